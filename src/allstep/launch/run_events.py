"""What `run_state` takes and what it decides: events in, decisions out.

Every event has a time `at`: seconds since the run began. Hosts are numbers in the order of their
ranks. Simultaneous events are applied in the order of `PRECEDENCE`, and by rank, host or number
among those of one type, so that the order of their arrival does not matter.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Greeted:
    """The agent of a host is there."""

    at: float
    host: int


@dataclass(frozen=True)
class WorkerStarted:
    """A worker of a host runs."""

    at: float
    host: int


@dataclass(frozen=True)
class Complained:
    """A rank has begun to print a traceback."""

    at: float
    rank: int


@dataclass(frozen=True)
class Exited:
    """A rank has ended. `code` as in subprocess.

    errors: the last lines on its standard error. blames: the rank that it recorded as the cause.
    """

    at: float
    rank: int
    code: int
    errors: tuple[str, ...] = ()
    out_of_memory: bool = False
    blames: int | None = None


@dataclass(frozen=True)
class LinkEnded:
    """The way to a host's agent has ended. why: what is known about the reason."""

    at: float
    host: int
    why: str


@dataclass(frozen=True)
class Refused:
    """A host cannot start its workers, or its agent is not understood. `text`: for the user."""

    at: float
    host: int
    text: str


@dataclass(frozen=True)
class StoreEnded:
    """The thread of the launcher's store has ended by itself."""

    at: float
    reason: str


@dataclass(frozen=True)
class Signaled:
    """The launcher has got a signal."""

    at: float
    number: int


Event = Greeted | WorkerStarted | Complained | Exited | LinkEnded | Refused | StoreEnded | Signaled

# A signal comes before the exits that it may explain, an exit before the end of its link.
PRECEDENCE: tuple[type, ...] = (
    Greeted,
    Signaled,
    Complained,
    Exited,
    Refused,
    StoreEnded,
    WorkerStarted,
    LinkEnded,
)


def order(event: Event) -> tuple[float, int, int, str]:
    """Return the key by which events are applied."""
    match event:
        case Exited():
            which, what = event.rank, str(event.code)
        case Complained():
            which, what = event.rank, ""
        case Signaled():
            which, what = event.number, ""
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
    """Send a signal to the workers of a host; of all hosts when None."""

    number: int
    host: int | None = None


@dataclass(frozen=True)
class KillAll:
    """Send SIGKILL to all workers."""


@dataclass(frozen=True)
class LeaveHost:
    """Do not talk to a host's agent any more. lost: its workers may still run."""

    host: int
    lost: bool


Decision = SendSignal | KillAll | LeaveHost
