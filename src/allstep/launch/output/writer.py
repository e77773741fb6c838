"""What the user sees of the workers: whole lines, each with its rank in front; files get the bytes
as written."""

import contextlib
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import TextIO

from allstep.console.escape import escaped
from allstep.errors import ConfigError
from allstep.launch.output.lines import as_printed
from allstep.launch.output.sink import Sink, wait_for_reader, without_blocking

_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)  # of a terminal: cyan, yellow, green, ...
_KEPT_LINES = 400  # of each rank's standard error, for the failure report


def _short(rank: int, stream: str, colour: bool) -> str:
    return f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m[{rank}]\x1b[0m " if colour else f"[{rank}] "


def _horovods(rank: int, stream: str, colour: bool) -> str:
    return f"[{rank}]<std{stream}>:"


# How a line begins: rank and stream, on a terminal that shows colours or not.
PREFIXES: dict[str, Callable[[int, str, bool], str]] = {"allstep": _short, "horovod": _horovods}


class Output:
    """Prints the workers' lines, writes files where asked, and remembers the last of their errors.

    show: the ranks to print (None for all). log_dir: a folder for one file per rank, with the bytes
    that the worker wrote. stream_dir: a folder for Horovod's two files per rank. prefix: a name of
    PREFIXES. timestamps: the time in front of each printed line.
    """

    def __init__(
        self,
        size: int,
        show: Collection[int] | None,
        log_dir: Path | None,
        stream_dir: Path | None = None,
        prefix: str = "allstep",
        timestamps: bool = False,
    ) -> None:
        self.show = show
        self.errors: list[deque[str]] = [deque(maxlen=_KEPT_LINES) for _ in range(size)]
        self._colour = {"out": _takes_colour(sys.stdout), "err": _takes_colour(sys.stderr)}
        self.wait: Callable[[int], bool] = wait_for_reader
        """Called while a reader does not read, with the descriptor; False drops what was to be
        written there."""
        # What cannot be written to one of them is reported on the other.
        self._sinks = {
            "out": self._sink(
                _descriptor(sys.stdout), "standard output", partial(self._print, "err")
            ),
            "err": self._sink(
                _descriptor(sys.stderr), "standard error", partial(self._print, "out")
            ),
        }
        self._prefix = PREFIXES[prefix]
        self._timestamps = timestamps
        self._files = [
            *([_open_logs(log_dir, size, self._log)] if log_dir is not None else []),
            *([_open_streams(stream_dir, size, self._log)] if stream_dir is not None else []),
        ]

    def _sink(self, fd: int, name: str, report: Callable[[str], None]) -> Sink:
        return Sink(fd, name, report, wait=lambda fd: self.wait(fd))

    def _log(self, fd: int, name: str) -> Sink:
        return self._sink(fd, name, self.say)

    def write(self, rank: int, stream: str, pieces: Sequence[str]) -> list[str]:
        """Take pieces of one worker's standard output ("out") or error ("err"), as `Lines` cuts
        them.

        Returns the lines of standard error, without their newlines; nothing for standard output.
        """
        for files in self._files:
            files[rank, stream].write(_encoded("".join(pieces)))
        printed = "".join(map(as_printed, pieces))
        errors = printed.split("\n")[:-1] if stream == "err" else []
        self.errors[rank].extend(errors)
        if printed and self.shows(rank):
            when = time.asctime() if self._timestamps else ""
            prefix = f"{when}{self._prefix(rank, stream, self._colour[stream])}"
            self._sinks[stream].write(_encoded(_with_prefix(prefix, printed)))
        return errors

    def shows(self, rank: int) -> bool:
        """Whether the lines of a rank are printed."""
        return self.show is None or rank in self.show

    def say(self, text: str) -> None:
        """Print a text of the launcher's own; what it quotes of workers is escaped."""
        self._print("err", text)

    def close(self) -> None:
        for files in self._files:
            for file in dict.fromkeys(files.values()):
                file.close()

    def _print(self, stream: str, text: str) -> None:
        self._sinks[stream].write(_encoded(escaped(text, keep="\n\t") + "\n"))


def _with_prefix(prefix: str, lines: str) -> str:
    """Put the prefix in front of every line. One replacement is quicker than a loop over lines."""
    return prefix + lines[:-1].replace("\n", f"\n{prefix}") + "\n"


def _encoded(text: str) -> bytes:
    """Return the bytes that a worker wrote; half a character that no worker can write is escaped."""
    try:
        return text.encode(errors="surrogateescape")
    except UnicodeEncodeError:  # from an agent that is not ours
        return text.encode(errors="backslashreplace")


def _descriptor(stream: TextIO | None) -> int:
    """Its file descriptor, with what was printed before us written; -1 where standard output was
    closed (`>&-`)."""
    if stream is None:
        return -1
    with contextlib.suppress(OSError):
        stream.flush()
    return without_blocking(stream.fileno())


def _takes_colour(stream: TextIO | None) -> bool:
    return (
        stream is not None
        and stream.isatty()
        and not os.environ.get("NO_COLOR")
        and os.environ.get("TERM") != "dumb"
    )


Files = dict[tuple[int, str], Sink]  # by rank and stream
MakeSink = Callable[[int, str], Sink]  # from a descriptor and its name


def _open_logs(folder: Path, size: int, make: MakeSink) -> Files:
    """One file per rank."""
    paths = [folder / f"rank-{_padded(rank, size)}.log" for rank in range(size)]
    files = [_open(path, "--log-dir", make) for path in paths]
    return {(rank, stream): files[rank] for rank in range(size) for stream in ("out", "err")}


def _open_streams(folder: Path, size: int, make: MakeSink) -> Files:
    """Horovod's way: a folder per rank, a file per stream."""
    return {
        (rank, stream): _open(
            folder / f"rank.{_padded(rank, size)}" / f"std{stream}", "--output-filename", make
        )
        for rank in range(size)
        for stream in ("out", "err")
    }


def _padded(rank: int, size: int) -> str:
    return f"{rank:0{len(str(size - 1))}}"


def _open(path: Path, option: str, make: MakeSink) -> Sink:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(
            path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NONBLOCK, 0o666
        )
        # Not blocking: a pipe without a reader is an error at once (ENXIO).
    except (FileExistsError, NotADirectoryError) as error:
        blocking = next(
            (each for each in path.parents if each.exists() and not each.is_dir()), path.parent
        )
        raise ConfigError(
            f"{option}: {blocking} is not a folder; name a folder, new or existing"
        ) from error
    except OSError as error:
        raise ConfigError(f"{option}: {path}: {error.strerror}") from error
    return make(fd, escaped(str(path)))
