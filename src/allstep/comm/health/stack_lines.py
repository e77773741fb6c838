"""The position of a program, in the user's own lines.

Frames of torch, allstep and Python's start-up are left out.
"""

import contextlib
import os
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import torch

_MAX_LINES = 12
_OURS = tuple(
    f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parents[1])
)
_PYTHONS = f"{sysconfig.get_path('stdlib')}{os.sep}"


_called = threading.local()


@contextlib.contextmanager
def called_from(line: str) -> Iterator[None]:
    """Make `callers_line` return `line` in this context, for a call that runs in another thread.

    `line` is where the user called it, or "" if that is not known.
    """
    _called.line = line
    try:
        yield
    finally:
        del _called.line


def callers_line() -> str:
    """Return the user's line that led here; empty if it is not known.

    For example `train.py:88 in validate: loss = model(batch)`.
    """
    if hasattr(_called, "line"):
        return str(_called.line)
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_internal(frame.f_code.co_filename):
        frame = frame.f_back
    return _lines(frame)[-1] if frame is not None else ""


def main_threads_lines() -> list[str]:
    """Return the stack of the main thread, the innermost call last."""
    return thread_lines(threading.main_thread().ident)


def thread_lines(ident: int | None) -> list[str]:
    """Return the stack of a thread of this process, the innermost call last."""
    frame = sys._current_frames().get(ident or 0)
    return _lines(frame)[-_MAX_LINES:] if frame is not None else []


def _lines(frame: FrameType) -> list[str]:
    found = [entry for entry in traceback.extract_stack(frame) if not _is_internal(entry.filename)]
    return [
        f"{_short(entry.filename)}:{entry.lineno} in {entry.name}: {entry.line}" for entry in found
    ]


def _is_internal(filename: str) -> bool:
    if filename.startswith((*_OURS, "<frozen")):
        return True
    # Installed libraries may be in a subfolder of Python's own.
    return filename.startswith(_PYTHONS) and "-packages" not in filename


def _short(filename: str) -> str:
    here = f"{Path.cwd()}{os.sep}"
    return filename.removeprefix(here)
