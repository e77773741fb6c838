"""Whether a signal was delivered to the agents of all hosts or of some. Pure: times are arguments.

Slurm sends a signal to the job steps of a job one after the other. One that all living hosts have
received within a second is a signal to the run; otherwise it is one to those hosts.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

SPREAD_SECONDS = 1.0
"""Time in which all hosts receive one signal."""


@dataclass
class _Received:
    since: float
    hosts: set[int] = field(default_factory=set)


class SignalsByHost:
    """The signals that agents have reported and that were not acted on yet."""

    def __init__(self) -> None:
        self._received: dict[int, _Received] = {}

    def add(self, number: int, host: int, at: float) -> None:
        """Record that the agent of a host has received a signal."""
        self._received.setdefault(number, _Received(at)).hosts.add(host)

    @property
    def is_waiting(self) -> bool:
        """Return whether there is a signal to act on soon."""
        return bool(self._received)

    def take(self, now: float, living: Collection[int]) -> list[tuple[int, frozenset[int] | None]]:
        """Return the signals to act on now, each with its hosts, or None for all.

        living: hosts whose agents can report a signal.
        """
        due: list[tuple[int, frozenset[int] | None]] = []
        for number, received in list(self._received.items()):
            is_of_all = received.hosts.issuperset(living)
            if is_of_all or now >= received.since + SPREAD_SECONDS:
                del self._received[number]
                due.append((number, None if is_of_all else frozenset(received.hosts)))
        return due
