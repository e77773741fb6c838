"""`allstep run` as a user calls it, for tests."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.ranks import clean_environment

ALLSTEP = [sys.executable, "-m", "allstep"]


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str
    seconds: float

    @property
    def last_lines(self) -> str:
        """What `allstep run` said last and alone: everything from its own last line on."""
        _, mark, tail = self.err.rpartition("allstep run: ")
        return mark + tail


def run(
    *arguments: str | Path,
    prefix: Sequence[str] = (),
    command: Sequence[str] = ALLSTEP,
    env: dict[str, str] | None = None,
    cwd: Path | None = None,
    limit: float = 100,
) -> Done:
    """Run `allstep ...`, or another command, to its end."""
    started = time.monotonic()
    process = start(*arguments, prefix=prefix, command=command, env=env, cwd=cwd)
    try:
        out, err = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        pytest.fail(
            f"allstep {arguments} was not done after {limit} s\n{out}\n{err}", pytrace=False
        )
    return Done(process.returncode, out, err, time.monotonic() - started)


def start(
    *arguments: str | Path,
    prefix: Sequence[str] = (),
    command: Sequence[str] = ALLSTEP,
    env: dict[str, str] | None = None,
    cwd: Path | None = None,
) -> "subprocess.Popen[str]":
    """Start `allstep ...`, or another command, in a process group of its own."""
    return subprocess.Popen(
        [*prefix, *command, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        cwd=cwd,
        env={**clean_environment(), **(env or {})},
        start_new_session=True,
    )


def processes_with(mark: str) -> list[int]:
    """The living processes whose environment or command line holds `mark`: what a run left behind."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        try:
            words = (folder / "environ").read_bytes() + (folder / "cmdline").read_bytes()
            dead = (folder / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except OSError:
            continue
        if mark.encode() in words and not dead:
            found.append(int(folder.name))
    return found
