"""What the user sees of the workers: whole lines, each with its rank in front."""

import os
import sys
from collections import deque
from collections.abc import Collection
from pathlib import Path
from typing import TextIO

from allstep.errors import ConfigError

_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)  # of a terminal: cyan, yellow, green, ...
_KEPT_LINES = 400  # of each rank's standard error, for the failure report


class Output:
    """Prints the workers' lines, writes them to files where asked, and remembers the last of their errors.

    show: the ranks to print (None for all). log_dir: a folder for one file per rank, without prefixes.
    """

    def __init__(self, size: int, show: Collection[int] | None, log_dir: Path | None) -> None:
        self.show = show
        self.errors: list[deque[str]] = [deque(maxlen=_KEPT_LINES) for _ in range(size)]
        self._streams = {"out": sys.stdout, "err": sys.stderr}
        self._colour = {name: _takes_colour(stream) for name, stream in self._streams.items()}
        self._files = _open_files(log_dir, size) if log_dir is not None else None

    def lines(self, rank: int, stream: str, lines: list[str]) -> None:
        """Lines of one worker, from its standard output ("out") or error ("err")."""
        if stream == "err":
            self.errors[rank].extend(lines)
        if self._files is not None:
            self._files[rank].writelines(f"{line}\n" for line in lines)
        if self.show is None or rank in self.show:
            prefix = self._prefix(rank, stream)
            self._write(stream, "".join(f"{prefix}{line}\n" for line in lines))

    def say(self, text: str) -> None:
        """A line of the launcher's own."""
        self._write("err", f"{text}\n")

    def close(self) -> None:
        for file in self._files or []:
            file.close()

    def _prefix(self, rank: int, stream: str) -> str:
        if not self._colour[stream]:
            return f"[{rank}] "
        return f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m[{rank}]\x1b[0m "

    def _write(self, stream: str, text: str) -> None:
        target = self._streams[stream]
        try:
            target.buffer.write(text.encode(errors="surrogateescape"))
            target.flush()
        except (BrokenPipeError, ValueError):
            return  # the reader of our output went away (| head): the run goes on


def _takes_colour(stream: TextIO) -> bool:
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _open_files(folder: Path, size: int) -> list[TextIO]:
    digits = len(str(size - 1))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return [
            (folder / f"rank-{rank:0{digits}}.log").open("w", errors="surrogateescape", buffering=1)
            for rank in range(size)
        ]
    except OSError as error:
        raise ConfigError(f"--log-dir {folder}: {error.strerror}") from error
