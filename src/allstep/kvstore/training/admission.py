"""Which push has to wait, by mode. A party that waits holds no lock.

=========  =====================================================================================
async      none
lazy:K     none
elastic:H  none
stale:S    one that would make another party's gradient older than S rounds (`gradient_age`)
clock:S    one by which its party would be more than S pushes ahead of the slowest (SSP)
=========  =====================================================================================

There is one admission for the whole model, under the lock of the first unit. Only parties that
compute a gradient count: neither those at a synchronization point nor lost ones.
"""

from collections.abc import Callable, Mapping

from allstep.kvstore.memory.bounded_wait import BoundedWait
from allstep.kvstore.memory.key_memory import Slice
from allstep.kvstore.rules.gradient_age import blocker, max_age
from allstep.kvstore.training.party_lines import READ, STEPS, TICK, PartyLines
from allstep.parallel.sync_mode import SyncMode

Rule = Callable[[int, int, Mapping[int, int]], int | None]
"""`rule(version, own steps, others)` returns a party to wait for, or None."""


def stale(bound: int) -> Rule:
    """Return the rule of `stale`. bound: the largest age. `others`: versions read."""
    return lambda version, steps, others: blocker(version, others, bound)


def clock(bound: int) -> Rule:
    """Return the rule of `clock`. bound: the largest lead. `others`: pushes made."""

    def slowest(version: int, steps: int, others: Mapping[int, int]) -> int | None:
        late = min(others, key=lambda rank: (others[rank], rank), default=None)
        return late if late is not None and steps + 1 - others[late] > bound else None

    return slowest


class PushAdmission:
    """Admits the pushes of one party. Made for a round, since its bound depends on the parties.

    others: the other parties that were not lost when the round began.
    """

    def __init__(
        self,
        mode: SyncMode,
        lines: PartyLines,
        rank: int,
        others: set[int],
        begin_wait: Callable[[str], BoundedWait],
    ) -> None:
        self._lines, self._rank, self._others = lines, rank, set(others)
        self._begin_wait, self._text = begin_wait, f"sync={mode}, push"
        self._waiting: BoundedWait | None = None
        self._rule, self._field = None, READ
        if mode.name == "stale":
            self._rule = stale(max_age(mode.number, len(others) + 1))
        elif mode.name == "clock":
            self._rule, self._field = clock(mode.number), STEPS

    @property
    def waited(self) -> float:
        """Seconds since the wait of this push began; 0 if it had none."""
        return 0.0 if self._waiting is None else self._waiting.seconds

    def begin(self) -> None:
        """Forget the wait of the last push."""
        self._waiting = None

    def blocker(self, first: Slice) -> int | None:
        """Return the party to wait for, or None. The caller has locked the first unit."""
        if self._rule is None:
            return None
        others = self._lines.computing(self._others, self._field)
        return self._rule(first.num_updates, self._lines.get(self._rank, STEPS), others)

    def wait(self, peer: int) -> None:
        """Wait until that party has pushed, or is lost. The caller holds no lock."""
        if self._waiting is None:
            self._waiting = self._begin_wait(self._text)
        seen = self._lines.get(peer, TICK)
        if not self._waiting.nap(self._lines.address(peer), seen, peer):
            self._others.discard(peer)
