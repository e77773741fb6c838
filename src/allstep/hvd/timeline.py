"""Horovod's calls to start and stop a timeline: what may be asked for, and what was.

`HOROVOD_TIMELINE=FILE` at `init()` asks for a timeline from the start, `HOROVOD_TIMELINE=DYNAMIC` only allows `start_timeline`. Without
the variable a later start is an error, as it is with Horovod. `asked` is what the writer of the engine goes by; the file belongs
to rank 0, which makes it at once: a path that cannot be written is an error here and now.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from allstep.hvd.place import rank, running
from allstep.hvd.util import env_flag

VARIABLE = "HOROVOD_TIMELINE"


@dataclass(frozen=True)
class Asked:
    """A timeline that should be written."""

    path: Path
    mark_cycles: bool


asked: Asked | None = None
_allowed = False


def begin_if_asked() -> None:
    """Called by `init`: read the variable once."""
    global _allowed
    value = os.environ.get(VARIABLE, "")
    _allowed = bool(value)
    if value and value.upper() != "DYNAMIC":
        start_timeline(value, env_flag("HOROVOD_TIMELINE_MARK_CYCLES"))


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Write what the engine does to this file of rank 0, from now on. Another file, or the same again, may follow."""
    global asked
    running()
    if not _allowed:
        raise ValueError(f"start_timeline({file_path!r}) needs {VARIABLE} to be set at init(): {VARIABLE}=DYNAMIC")
    if rank() == 0:
        try:
            Path(file_path).write_text("[]\n")
        except OSError as error:
            raise ValueError(f"start_timeline({file_path!r}): rank 0 cannot write it: {error.strerror}") from error
    asked = Asked(Path(file_path), mark_cycles)


def stop_timeline() -> None:
    """End it; nothing happens when there is none."""
    global asked
    running()
    asked = None


def forget() -> None:
    """Called by `shutdown`."""
    global asked, _allowed
    asked, _allowed = None, False
