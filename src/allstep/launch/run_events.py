"""The events that `run_state` takes, the decisions that it returns, and the end of a run.

Every event has a time `at`: seconds since the start of the run. Hosts are numbered in the order of
their ranks. Simultaneous events are applied in the order of `PRECEDENCE`, and by rank, host or
number among those of one type, so that the order of their arrival does not matter.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Greeted:
    """The agent of a host has sent its hello."""

    at: float
    host: int


@dataclass(frozen=True)
class WorkerStarted:
    """A worker of a host has been started."""

    at: float
    host: int


@dataclass(frozen=True)
class TracebackStarted:
    """A rank has begun to print a traceback."""

    at: float
    rank: int


@dataclass(frozen=True)
class Exited:
    """A rank has ended.

    code: as in subprocess, negative for a signal. errors: the last lines on its standard error.
    blames: the rank that it recorded as the cause, or None. fault: the injected fault that it
    reported before, or "".
    """

    at: float
    rank: int
    code: int
    errors: tuple[str, ...] = ()
    out_of_memory: bool = False
    blames: int | None = None
    fault: str = ""


@dataclass(frozen=True)
class LinkEnded:
    """The link to a host's agent has ended; `why` is the reason as far as it is known."""

    at: float
    host: int
    why: str


@dataclass(frozen=True)
class Refused:
    """A host cannot start its workers, or its agent is not understood; `text` is for the user."""

    at: float
    host: int
    text: str


@dataclass(frozen=True)
class StoreEnded:
    """The thread of the launcher's store has failed."""

    at: float
    reason: str


@dataclass(frozen=True)
class Signaled:
    """The launcher has received a signal."""

    at: float
    number: int


@dataclass(frozen=True)
class HostSignaled:
    """The agent of a host has received a signal."""

    at: float
    host: int
    number: int


Event = (
    Greeted
    | WorkerStarted
    | TracebackStarted
    | Exited
    | LinkEnded
    | Refused
    | StoreEnded
    | Signaled
    | HostSignaled
)

# A signal comes before the exits that it may explain, an exit before the end of its link.
PRECEDENCE: tuple[type, ...] = (
    Greeted,
    Signaled,
    HostSignaled,
    TracebackStarted,
    Exited,
    Refused,
    StoreEnded,
    WorkerStarted,
    LinkEnded,
)


def order(event: Event) -> tuple[float, int, int, str]:
    """Return the sort key of an event, by which events are applied."""
    match event:
        case Exited():
            which, what = event.rank, str(event.code)
        case TracebackStarted():
            which, what = event.rank, ""
        case Signaled():
            which, what = event.number, ""
        case HostSignaled():
            which, what = event.number, str(event.host)
        case StoreEnded():
            which, what = 0, event.reason
        case Refused():
            which, what = event.host, event.text
        case LinkEnded():
            which, what = event.host, event.why
        case Greeted() | WorkerStarted():
            which, what = event.host, ""
    return event.at, PRECEDENCE.index(type(event)), which, what


@dataclass(frozen=True)
class SendSignal:
    """Send a signal to the workers of a host, or of all hosts if `host` is None."""

    number: int
    host: int | None = None


@dataclass(frozen=True)
class KillAll:
    """Send SIGKILL to all workers."""


@dataclass(frozen=True)
class LeaveHost:
    """Stop using the link to a host's agent. lost: its workers may still run. why: for the user."""

    host: int
    lost: bool
    why: str = ""


Decision = SendSignal | KillAll | LeaveHost


@dataclass(frozen=True)
class Conclusion:
    """The end of a run: its exit code, and the text to print last ("" for none)."""

    code: int
    text: str = ""


class StateOfRun(Protocol):
    """What the loop needs of the state of a run: `RunState`, or that of an elastic run."""

    problem: str | None
    started: bool

    def note_alive(self, host: int, now: float) -> None: ...

    def take(self, event: Event) -> None: ...

    def start(self) -> None: ...

    def decide(self, now: float) -> Sequence[object]: ...

    def decide_while_blocked(self, now: float) -> Sequence[object]: ...

    def must_end(self, now: float) -> bool: ...

    def conclusion(
        self, now: float, shows: Callable[[int], bool], *, foreground: bool
    ) -> Conclusion: ...

    @property
    def has_deadline(self) -> bool: ...

    @property
    def may_start(self) -> bool: ...

    @property
    def is_over(self) -> bool: ...
