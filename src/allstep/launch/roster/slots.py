"""The slots of all hosts: which may be used, and from when on.

A slot is capacity for one worker on a host. Hosts keep the order in which they were first found.
A slot is *offered* while its host lists it and is neither leaving nor blacklisted; it is *usable*
while it is offered and has not been given up. The slot of a dead worker stays empty for a while
that doubles with each failure (`Policy.delay_after`); a finished step in the slot clears its
failures. A host that cannot start a worker once there was a world is tried again and again. A host
that was withdrawn and is listed again starts without failures, but remains blacklisted.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from allstep.launch.roster.elastic_policy import Policy

Place = tuple[str, int]
"""A slot: the label of its host, and its number on it."""


@dataclass
class _Slot:
    failures: int = 0
    # Starts in a row that failed because of the host, which never give the slot up.
    failed_starts: int = 0
    free_at: float = 0.0


@dataclass
class _HostSlots:
    num_slots: int = 0
    is_leaving: bool = False
    blacklisted_until: float = 0.0
    times_blacklisted: int = 0
    slots: dict[int, _Slot] = field(default_factory=dict)


class Slots:
    """The slots of all hosts that were ever found."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._hosts: dict[str, _HostSlots] = {}

    def find(self, hosts: Sequence[tuple[str, int]]) -> None:
        """Replace the list of hosts; those that are missing in it are withdrawn."""
        listed = dict(hosts)
        for label in listed:
            self._hosts.setdefault(label, _HostSlots())
        for label, host in self._hosts.items():
            host.num_slots = listed.get(label, 0)
            if label not in listed:
                host.slots.clear()
                host.is_leaving = False

    def leave(self, host: str) -> None:
        """Treat a host as withdrawn until it was missing in a list."""
        if host in self._hosts:
            self._hosts[host].is_leaving = True

    def blacklist(self, host: str, now: float) -> None:
        """Exclude a host, for the time of its cool-down."""
        found = self._hosts[host]
        found.times_blacklisted += 1
        found.blacklisted_until = now + self._policy.cooldown_of(host, found.times_blacklisted)
        found.slots.clear()

    def fail(self, place: Place, now: float, *, counts: bool = True) -> None:
        """Record that the worker of a slot died. counts: too often gives the slot up."""
        slot = self._slot(place)
        slot.failures += counts
        slot.failed_starts += not counts
        slot.free_at = now + self._policy.delay_after(slot.failures + slot.failed_starts)

    def clear_failures(self, place: Place) -> None:
        """Record that the worker of a slot finished a step."""
        slot = self._slot(place)
        slot.failures = slot.failed_starts = 0

    def offers(self, place: Place, now: float) -> bool:
        """Return whether a worker may stay in a slot."""
        host = self._hosts.get(place[0])
        if host is None or host.is_leaving or now < host.blacklisted_until:
            return False
        return place[1] < host.num_slots

    def usable(self, now: float) -> list[Place]:
        """Return the slots that may have a worker, now or after their delay, in host order."""
        return [
            place
            for place in self._all()
            if self.offers(place, now) and not self._is_given_up(place)
        ]

    def free(self, now: float, taken: set[Place]) -> list[Place]:
        """Return the slots in which a worker may start now. taken: slots with a process."""
        return [
            place
            for place in self.usable(now)
            if place not in taken and now >= self._slot(place).free_at
        ]

    def expected(self, now: float) -> int:
        """Return how many slots there will be without another list, those that cool down too."""
        cooling = sum(
            host.num_slots
            for host in self._hosts.values()
            if now < host.blacklisted_until < float("inf") and not host.is_leaving
        )
        return len(self.usable(now)) + cooling

    @property
    def num_given_up(self) -> int:
        """Return how many listed slots will not be used again, because their workers failed."""
        blacklisted = (
            host.num_slots
            for host in self._hosts.values()
            if host.blacklisted_until == float("inf")
        )
        return sum(self._is_given_up(place) for place in self._all()) + sum(blacklisted)

    def is_blacklisted(self, host: str) -> bool:
        """Return whether a failing worker has ever excluded a host."""
        return self._hosts[host].times_blacklisted > 0

    @property
    def hosts(self) -> list[str]:
        """Return the labels of all hosts in the order in which they were found."""
        return list(self._hosts)

    def timers(self, taken: set[Place], now: float) -> Iterator[float]:
        """Yield the times at which a slot or a host may be used again."""
        for host in self._hosts.values():
            if now < host.blacklisted_until < float("inf"):
                yield host.blacklisted_until
        for place in self.usable(now):
            if place not in taken:
                yield self._slot(place).free_at

    def _slot(self, place: Place) -> _Slot:
        return self._hosts[place[0]].slots.setdefault(place[1], _Slot())

    def _all(self) -> list[Place]:
        return [
            (label, number)
            for label, host in self._hosts.items()
            for number in range(host.num_slots)
        ]

    def _is_given_up(self, place: Place) -> bool:
        return self._slot(place).failures >= self._policy.max_failures
