"""Which rank failed first, and why: the last thing a failed run prints, alone.

When one rank dies the others soon fail too, because it no longer answers; and a dying process may
still be tearing down while its peers already complain. So "first" is not simply the first exit. A
rank failed at the moment its traceback began to appear, or else when it ended; and a rank that
blames another one is a consequence as long as another one failed for a reason of its own.

A rank that uses allstep records in the launcher's store which rank it blames, itself included
(`blamed_by`). Only for processes without such a record do their last words count: whether they are
about a lost connection.

What a worker has told in whole is not told again. A verb of allstep ends bad input with `allstep:
...` on rank 0, what belongs to it indented below, and exit status 2 (1 for a run that went wrong);
the other ranks leave with the same status and without a word. That is all the user needs; `teller`
finds it.
"""

import json
import re
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_TORCHS_PREFIX = re.compile(r"^\[rank\d+\]: ?")  # torch puts it before each line of a traceback
_TRACEBACK = "Traceback (most recent call last):"
_FATAL = "Fatal Python error:"
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
_CONSEQUENCES = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "PeerLost",
    "DistNetworkError",
    "ncclRemoteError",
    "remote process exited",
    "recvValue failed",
    "the store at",
    "Horovod has been shut down",
)
# Kinds of a recorded failure whose `peer` is the cause; that of a timeout is only late.
_BLAMING = ("PeerLost", "CommError")
_LAST_LINES = 10
_OWN = "allstep: "  # how a verb of ours begins its last words
_OWN_CODES = (1, 2)


@dataclass(frozen=True)
class Failure:
    """How one rank failed.

    `code` as in subprocess: negative for a signal. `moment`: seconds since the run began.
    """

    rank: int
    host: str
    code: int
    moment: float
    errors: tuple[str, ...] = ()
    out_of_memory: bool = False
    lost: str = ""  # why its host counts as lost; then there is no code
    # The rank that it recorded as the cause; None without a record.
    blames: int | None = None

    @property
    def is_consequence(self) -> bool:
        """Whether it blames another rank; without a record, whether it prints of a lost connection."""
        if self.lost:
            return False
        if self.blames is not None:
            return self.blames != self.rank
        words = "\n".join(last_words(self.errors))
        return any(sign in words for sign in _CONSEQUENCES)

    @property
    def has_traceback(self) -> bool:
        """Whether there is one in what it printed."""
        return any(starts_traceback(line) for line in self.errors)

    @property
    def is_silent(self) -> bool:
        """Whether it left as a verb of ours does on all ranks but the one that tells why: that one
        may come a little later."""
        return not self.lost and self.code in _OWN_CODES and not self.errors

    @property
    def may_follow(self) -> bool:
        """Whether the cause may be the failure of another rank that has not been reported yet."""
        return self.is_consequence or self.is_silent

    @property
    def says_why(self) -> bool:
        """Whether its last words are a verb's of ours: one line and what is indented below it."""
        if self.lost or self.has_traceback or self.code not in _OWN_CODES:
            return False
        words = [line for line in last_words(self.errors) if line.strip()]
        return next(
            (line.startswith(_OWN) for line in reversed(words) if not line[0].isspace()), False
        )

    @property
    def exit_code(self) -> int:
        """What the launcher ends with for it."""
        if self.lost:
            return 1
        return 128 - self.code if self.code < 0 else self.code

    @property
    def how(self) -> str:
        """`exit code 3`, `killed by signal 9 (SIGKILL)`."""
        if self.lost:
            return self.lost
        if self.code >= 0:
            return f"exit code {self.code}"
        try:
            name = f" ({signal.Signals(-self.code).name})"
        except ValueError:
            name = ""
        hint = (
            "; the kernel's out-of-memory killer was at work on that host"
            if self.out_of_memory
            else ""
        )
        if self.code == -signal.SIGBUS:
            hint += (
                "; a mapped file became shorter while it was read (a data file?), or its disk"
                " failed"
            )
        return f"killed by signal {-self.code}{name}{hint}"


def blamed_by(record: bytes | None) -> int | None:
    """Return the rank that a record in the store blames; None for none and for a bad record."""
    try:
        found = json.loads(record or b"null")
    # RecursionError: thousands of opening brackets.
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or found.get("kind") not in _BLAMING:
        return None
    peer = found.get("peer")
    return peer if type(peer) is int else None


def first(failures: Iterable[Failure]) -> Failure:
    """The failure that the others follow from; of simultaneous ones that of the lowest rank."""
    return min(failures, key=lambda failure: (failure.is_consequence, failure.moment, failure.rank))


def teller(failures: Sequence[Failure], shown: Sequence[Failure]) -> Failure | None:
    """The one of those whose output was `shown` that has told the user what the first failure was
    about: there is little to add."""
    cause = first(failures)
    if cause.lost or cause.has_traceback:
        return None
    tell = [each for each in shown if each.says_why and each.code == cause.code]
    return cause if cause in tell else next(iter(tell), None)


def starts_traceback(line: str) -> bool:
    """Whether a worker begins to say why it fails."""
    return _plain(line).startswith((_TRACEBACK, _FATAL))


def _plain(line: str) -> str:
    return _TORCHS_PREFIX.sub("", line)


def last_words(errors: Sequence[str]) -> list[str]:
    """The last traceback in what a rank printed on standard error, with the ones it is chained to;
    else its last lines."""
    lines = [_plain(line) for line in errors]
    starts = [index for index, line in enumerate(lines) if starts_traceback(line)]
    if not starts:
        return lines[-_LAST_LINES:]
    start = starts.pop()
    while starts and any(line.startswith(_CHAINED) for line in lines[starts[-1] : start]):
        start = starts.pop()
    return lines[start:]


def closing_words(
    failures: Sequence[Failure], shown: Sequence[Failure], size: int, num_stopped: int
) -> str:
    """The last thing that is printed: the whole report, or who it was, when a worker has said why."""
    told = teller(failures, shown)
    return headline(told, size, num_stopped) if told else report(first(failures), size, num_stopped)


def report(failure: Failure, size: int, num_stopped: int) -> str:
    """The text that ends a failed run."""
    lines = ["", headline(failure, size, num_stopped)]
    words = last_words(failure.errors)
    if words and not failure.lost:
        if not starts_traceback(words[0]):
            lines.append(
                "It printed no traceback; the last lines on its standard error (rank"
                f" {failure.rank}):"
            )
        lines += [f"  {line}" for line in words]
    return "\n".join(lines)


def headline(failure: Failure, size: int, num_stopped: int) -> str:
    """Who failed, how and when."""
    head = (
        f"rank {failure.rank} on {failure.host} failed first of {size}"
        if size > 1
        else f"rank {failure.rank} on {failure.host} failed"
    )
    if failure.lost:
        head = f"host {failure.host} is lost"
    stopped = (
        f"; {num_stopped} other{'s were' if num_stopped > 1 else ' was'} stopped"
        if num_stopped
        else ""
    )
    return f"allstep run: {head}: {failure.how}, {failure.moment:.1f} s after the start{stopped}"
