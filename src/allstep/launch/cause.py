"""Which rank failed first, and why: the report at the end of a failed run.

When one rank ends, the others soon fail too, because it no longer answers; and a process that ends
may still be freeing memory while its peers already report a lost connection. So the first failure
is not simply the first exit. A rank failed at the time its traceback began to appear, or else when
it ended; and a rank that blames another one is a consequence as long as another one failed for a
reason of its own.

A rank that uses allstep records in the launcher's store which rank it blames, itself included
(`blamed_by`). For processes without such a record, the last lines on standard error decide: whether
they are about a lost connection.

A complete explanation by a worker is not repeated. A command of allstep ends bad input with
`allstep: ...` on rank 0, details indented below, and exit status 2 (1 for a run that failed); the
other ranks exit with the same status and print nothing. `explained_by` finds such an explanation,
and the report is then one line.
"""

import json
import re
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# torch puts it before each line of a traceback.
_TORCHS_PREFIX = re.compile(r"^\[rank\d+\]: ?")
# Characters of an error that a line quotes.
_MAX_ERROR = 200
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
# Kinds of a recorded failure whose `peer` is the cause. The peer of a timeout may only be late.
_BLAMING = ("PeerLost", "CommError")
_LAST_LINES = 10
# Start of the error line of an allstep command.
_OWN = "allstep: "
_OWN_CODES = (1, 2)


@dataclass(frozen=True)
class Failure:
    """The failure of one rank.

    code: exit code as in subprocess, negative for a signal. moment: seconds since the start of the
    run. errors: last lines on standard error. out_of_memory: the kernel has killed processes of the
    host for lack of memory. lost: why its host is lost, in which case there is no code; "" if it is
    not. blames: the rank that it recorded as the cause, None without a record. fault: the last
    injected fault that it reported, "" without one. was_late: the launcher has killed it, because
    it had not ended in time.
    """

    rank: int
    host: str
    code: int
    moment: float
    errors: tuple[str, ...] = ()
    out_of_memory: bool = False
    lost: str = ""
    blames: int | None = None
    fault: str = ""
    was_late: bool = False

    @property
    def is_consequence(self) -> bool:
        """Return whether it blames another rank or, without a record, prints a connection error."""
        if self.lost:
            return False
        if self.blames is not None:
            return self.blames != self.rank
        text = "\n".join(last_error_lines(self.errors))
        return any(sign in text for sign in _CONSEQUENCES)

    @property
    def has_traceback(self) -> bool:
        """Return whether its standard error has a traceback."""
        return any(starts_traceback(line) for line in self.errors)

    @property
    def is_silent(self) -> bool:
        """Return whether it exited without output, as an allstep command does on all ranks but one.

        The exit of the rank that prints the reason may be reported a little later.
        """
        return not self.lost and self.code in _OWN_CODES and not self.errors

    @property
    def may_follow(self) -> bool:
        """Return whether the cause may be another rank whose failure is not reported yet."""
        return self.is_consequence or self.is_silent

    @property
    def explains_itself(self) -> bool:
        """Return whether its output ends with the error of an allstep command.

        That is one line `allstep: ...` with details indented below.
        """
        if self.lost or self.has_traceback or self.code not in _OWN_CODES:
            return False
        lines = [line for line in last_error_lines(self.errors) if line.strip()]
        heads = (line for line in reversed(lines) if not line[0].isspace())
        return next(heads, "").startswith(_OWN)

    @property
    def exit_code(self) -> int:
        """Return the exit code of the launcher for this failure: 128 + n for signal n."""
        if self.lost:
            return 1
        return 128 - self.code if self.code < 0 else self.code

    @property
    def how(self) -> str:
        """Return how it ended: `exit code 3`, `killed by signal 9 (SIGKILL)`, or why it is lost."""
        if self.lost:
            return self.lost
        if self.code >= 0:
            return f"exit code {self.code}"
        try:
            name = f" ({signal.Signals(-self.code).name})"
        except ValueError:
            name = ""
        return f"killed by signal {-self.code}{name}{self._hint}{self._last_error}"

    @property
    def _last_error(self) -> str:
        """Return the error of a rank that was killed while it ended, to be appended; or ""."""
        if not self.was_late or not self.has_traceback:
            return ""
        _, *lines = last_error_lines(self.errors)
        error = next((line for line in reversed(lines) if line.strip() and line[0] != " "), "")
        return f", because it had not ended in time after its error {error[:_MAX_ERROR]!r}"

    @property
    def _hint(self) -> str:
        """Return the likely reason for a signal, to be appended; "" if there is none."""
        hint = ""
        if self.out_of_memory:
            hint += "; the kernel's out-of-memory killer was at work on that host"
        if self.code == -signal.SIGBUS:
            hint += "; a mapped file, such as a data file, was truncated or its disk failed"
        return hint


def blamed_by(record: bytes | None) -> int | None:
    """Return the rank that a failure record blames; None for no record and for a malformed one."""
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
    """Return the failure that caused the others; of simultaneous ones that of the lowest rank."""
    return min(failures, key=lambda failure: (failure.is_consequence, failure.moment, failure.rank))


def explained_by(failures: Sequence[Failure], shown: Sequence[Failure]) -> Failure | None:
    """Return the failure whose printed output already explains the first one; None without one.

    shown: the failures of ranks whose output was printed.
    """
    cause = first(failures)
    if cause.lost or cause.has_traceback:
        return None
    explained = [each for each in shown if each.explains_itself and each.code == cause.code]
    return cause if cause in explained else next(iter(explained), None)


def starts_traceback(line: str) -> bool:
    """Return whether a line is the first one of a traceback or of a fatal error of Python."""
    return _plain(line).startswith((_TRACEBACK, _FATAL))


def _plain(line: str) -> str:
    return _TORCHS_PREFIX.sub("", line)


def last_error_lines(errors: Sequence[str]) -> list[str]:
    """Return the last traceback of a rank's standard error, with those that it is chained to.

    Without a traceback: the last 10 lines.
    """
    lines = [_plain(line) for line in errors]
    starts = [index for index, line in enumerate(lines) if starts_traceback(line)]
    if not starts:
        return lines[-_LAST_LINES:]
    start = starts.pop()
    while starts and any(line.startswith(_CHAINED) for line in lines[starts[-1] : start]):
        start = starts.pop()
    return lines[start:]


def final_report(
    failures: Sequence[Failure], shown: Sequence[Failure], size: int, num_stopped: int
) -> str:
    """Return the text that ends a failed run: one line if a worker has printed the reason.

    shown: the failures of ranks whose output was printed. size: number of ranks. num_stopped: ranks
    that the launcher stopped.
    """
    if explained := explained_by(failures, shown):
        return headline(explained, size, num_stopped)
    return report(first(failures), size, num_stopped)


def report(failure: Failure, size: int, num_stopped: int) -> str:
    """Return the headline of a failure and the end of its standard error, below an empty line."""
    lines = ["", headline(failure, size, num_stopped)]
    errors = last_error_lines(failure.errors)
    if errors and not failure.lost:
        if not starts_traceback(errors[0]):
            lines.append(
                "It printed no traceback; the last lines on its standard error (rank"
                f" {failure.rank}):"
            )
        lines += [f"  {line}" for line in errors]
    return "\n".join(lines)


def headline(failure: Failure, size: int, num_stopped: int) -> str:
    """Return one line: which rank failed, how and when."""
    head = f"rank {failure.rank} on {failure.host} failed{f' first of {size}' if size > 1 else ''}"
    if failure.lost:
        head = f"host {failure.host} is lost"
    others = "others were" if num_stopped > 1 else "other was"
    stopped = f"; {num_stopped} {others} stopped" if num_stopped else ""
    # A reader must not take an injected fault for a real one.
    how = f"{failure.how} (injected fault: {failure.fault})" if failure.fault else failure.how
    return f"allstep run: {head}: {how}, {failure.moment:.1f} s after the start{stopped}"
