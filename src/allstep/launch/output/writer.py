"""Prints the output of workers as whole lines with the rank in front, and writes log files.

Log files get the bytes that the workers wrote.
"""

import contextlib
import os
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import TextIO

from allstep.console.escape import escaped
from allstep.errors import ConfigError
from allstep.launch.output.lines import as_printed
from allstep.launch.output.sink import Sink, wait_for_reader, without_blocking

# Codes of a terminal: cyan, yellow, green, ...
_COLORS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)
# Lines of each rank's standard error that are kept for the failure report.
_KEPT_LINES = 400


def _short(rank: int, stream: str, color: bool) -> str:
    """Return `[0] `, colored by rank on a terminal."""
    return f"\x1b[{_COLORS[rank % len(_COLORS)]}m[{rank}]\x1b[0m " if color else f"[{rank}] "


def _horovods(rank: int, stream: str, color: bool) -> str:
    """Return `[0]<stdout>:`, as horovodrun does."""
    return f"[{rank}]<std{stream}>:"


# Functions that return the start of a line, from rank, stream and whether to use color.
PREFIXES: dict[str, Callable[[int, str, bool], str]] = {"allstep": _short, "horovod": _horovods}


class Output:
    """The output of all workers: prints lines, writes files, keeps the end of standard error.

    size: number of ranks. show: the ranks to print (None for all). log_dir: a folder for one file
    per rank, with the bytes that the worker wrote. stream_dir: a folder for Horovod's two files per
    rank. prefix: a name of PREFIXES. timestamps: print the time in front of each line.
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
        self.errors: defaultdict[int, deque[str]] = defaultdict(lambda: deque(maxlen=_KEPT_LINES))
        self.shown: Callable[[int], int] = lambda rank: rank
        """Returns the number to print for a worker, in an elastic run its current rank."""
        self._color = {"out": _takes_color(sys.stdout), "err": _takes_color(sys.stderr)}
        self.wait: Callable[[int], bool] = wait_for_reader
        """Called with a descriptor whose reader does not read; returns False to drop the output."""
        # An error of one stream is reported on the other.
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
        return self._sink(fd, name, self.notify)

    def write(self, rank: int, stream: str, chunks: Sequence[str]) -> list[str]:
        """Print and log `chunks` of a worker's standard output ("out") or standard error ("err").

        Returns the lines of standard error, without newlines; an empty list for standard output.
        """
        for files in self._files:
            files[rank, stream].write(_encoded("".join(chunks)))
        printed = "".join(map(as_printed, chunks))
        errors = printed.split("\n")[:-1] if stream == "err" else []
        self.errors[rank].extend(errors)
        if printed and self.shows(rank):
            when = time.asctime() if self._timestamps else ""
            prefix = f"{when}{self._prefix(self.shown(rank), stream, self._color[stream])}"
            self._sinks[stream].write(_encoded(_with_prefix(prefix, printed)))
        return errors

    def shows(self, rank: int) -> bool:
        """Return whether the lines of a rank are printed."""
        return self.show is None or self.shown(rank) in self.show

    def notify(self, text: str) -> None:
        """Print a text of the launcher on standard error; control characters are escaped."""
        self._print("err", text)

    def close(self) -> None:
        """Close the files."""
        for files in self._files:
            for file in dict.fromkeys(files.values()):
                file.close()

    def _print(self, stream: str, text: str) -> None:
        self._sinks[stream].write(_encoded(escaped(text, keep="\n\t") + "\n"))


def _with_prefix(prefix: str, lines: str) -> str:
    """Put the prefix in front of every line. One replacement is faster than a loop over lines."""
    return prefix + lines[:-1].replace("\n", f"\n{prefix}") + "\n"


def _encoded(text: str) -> bytes:
    """Return the bytes that a worker wrote; surrogates that are no byte of it are escaped."""
    try:
        return text.encode(errors="surrogateescape")
    # Only a foreign agent can send such a text.
    except UnicodeEncodeError:
        return text.encode(errors="backslashreplace")


def _descriptor(stream: TextIO | None) -> int:
    """Flush a stream and return its descriptor; -1 for a standard stream that is closed (`>&-`)."""
    if stream is None:
        return -1
    with contextlib.suppress(OSError):
        stream.flush()
    return without_blocking(stream.fileno())


def _takes_color(stream: TextIO | None) -> bool:
    return (
        stream is not None
        and stream.isatty()
        and not os.environ.get("NO_COLOR")
        and os.environ.get("TERM") != "dumb"
    )


class Files(dict[tuple[int, str], Sink]):
    """Sinks by rank and stream; those of a rank are opened when they are first needed."""

    def __init__(self, open_rank: Callable[[int], dict[str, Sink]]) -> None:
        super().__init__()
        self._open_rank = open_rank

    def __missing__(self, key: tuple[int, str]) -> Sink:
        self.open(key[0])
        return self[key]

    def open(self, rank: int) -> None:
        """Open the files of a rank."""
        self.update({(rank, stream): sink for stream, sink in self._open_rank(rank).items()})


# Makes a sink from a descriptor and its name.
MakeSink = Callable[[int, str], Sink]


def _open_logs(folder: Path, size: int, make: MakeSink) -> Files:
    """Open one file per rank, for both of its streams."""

    def open_rank(rank: int) -> dict[str, Sink]:
        sink = _open(folder / f"rank-{_padded(rank, size)}.log", "--log-dir", make)
        return {"out": sink, "err": sink}

    return _opened(Files(open_rank), size)


def _open_streams(folder: Path, size: int, make: MakeSink) -> Files:
    """Open the files of horovodrun: a folder per rank, a file per stream."""

    def open_rank(rank: int) -> dict[str, Sink]:
        of_rank = folder / f"rank.{_padded(rank, size)}"
        return {
            stream: _open(of_rank / f"std{stream}", "--output-filename", make)
            for stream in ("out", "err")
        }

    return _opened(Files(open_rank), size)


def _opened(files: Files, size: int) -> Files:
    """Open the files of all ranks that are known at the start."""
    for rank in range(size):
        files.open(rank)
    return files


def _padded(rank: int, size: int) -> str:
    """Return a rank with leading zeros, so that file names sort by rank."""
    return f"{rank:0{len(str(size - 1))}}"


def _open(path: Path, option: str, make: MakeSink) -> Sink:
    """Open a file for writing; ConfigError, which names `option`, if that fails."""
    # NONBLOCK: a pipe without a reader is an error (ENXIO) instead of a wait.
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, flags, 0o666)
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
