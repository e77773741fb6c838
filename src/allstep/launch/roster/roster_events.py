"""The events that the roster takes.

Every event has a time `at`: seconds since the start of the run. Workers are numbered in the order
in which the roster started them, and a number is never used again. Hosts are named by their label.
Simultaneous events are applied in the order of `PRECEDENCE`, and by their fields among those of
one type, so that the order of their arrival does not matter, except between lists of hosts.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class HostsFound:
    """The list of hosts, the first one or a later one. hosts: label and number of slots of each."""

    at: float
    hosts: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class HostsSignaled:
    """A signal has arrived, at the launcher or at agents. hosts: those of the agents, None: all."""

    at: float
    number: int
    hosts: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Standby:
    """A worker has registered and waits for a plan that names it."""

    at: float
    worker: int


@dataclass(frozen=True)
class Progress:
    """A member has finished a step, or a commit. updates: how many its state contains."""

    at: float
    worker: int
    generation: int
    updates: int


@dataclass(frozen=True)
class Ready:
    """A member has left its generation and waits for the next plan.

    updates: how many its state contains, those that it received from the source included. None if
    it has no whole state, because the broadcast to it was interrupted.
    """

    at: float
    worker: int
    generation: int
    updates: int | None


@dataclass(frozen=True)
class WorkerExited:
    """A worker has ended and can do no more harm.

    code: as in subprocess, negative for a signal. errors: the last lines on its standard error.
    blames: the rank of its generation that it recorded as the cause, or None. signature: a text
    that is equal for equal tracebacks, "" for none.
    """

    at: float
    worker: int
    code: int
    errors: tuple[str, ...] = ()
    out_of_memory: bool = False
    blames: int | None = None
    signature: str = ""


@dataclass(frozen=True)
class StartFailed:
    """A worker could not be started; `why` is for the user."""

    at: float
    worker: int
    why: str


@dataclass(frozen=True)
class HostLost:
    """A host is silent for so long that its agent has killed its workers by now."""

    at: float
    host: str
    why: str


Event = (
    HostsFound | HostsSignaled | Standby | Progress | Ready | WorkerExited | StartFailed | HostLost
)

# A signal and a withdrawal come before the exits that they may explain; what a worker reported
# comes before its exit, and its exit before the loss of its host.
PRECEDENCE: tuple[type, ...] = (
    HostsFound,
    HostsSignaled,
    Standby,
    Progress,
    Ready,
    WorkerExited,
    StartFailed,
    HostLost,
)


def arrival_order(event: Event) -> tuple[float, int, int, str]:
    """Return the sort key of an event, by which events are applied."""
    # The text decides between events of one type and worker that differ only in other fields.
    which, what = 0, repr(event)
    match event:
        case HostsFound():
            # The list that arrived last is the current one.
            what = ""
        case HostsSignaled():
            which = event.number
        case HostLost():
            pass
        case _:
            which = event.worker
    return event.at, PRECEDENCE.index(type(event)), which, what
