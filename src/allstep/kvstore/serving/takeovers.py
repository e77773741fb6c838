"""Parts that this server takes over from a lost one.

    party 0   offers version 118 ──┐                ┌── "send it"   ── the value ──> part is here
    party 1   offers version 121 ──┤ decide: 121    ├── "send it"
    party 2   offers version 117 ──┘                └── "no"        ── pull ... waits for the value

A party offers its last pulled copies when it notices the loss, which is in its next call. The
server decides when all living parties have offered, or a second after the first offer: a party that
computes for long holds up no other. What a later offer has is lost.

A state machine with a condition; one thread for each party calls `offer`.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from threading import Condition

from allstep.errors import PeerLost
from allstep.kvstore.rules.offers import Offer, freshest, num_lost
from allstep.kvstore.serving.party_calls import PartyCalls

WINDOW_SECONDS = 1.0
_LOOK_SECONDS = 0.2


class Takeovers:
    """The parts that have been offered to this server. calls: knows which parties are left."""

    def __init__(self, calls: PartyCalls) -> None:
        self._calls, self._changed = calls, Condition()
        self._offers: dict[int, dict[int, Offer]] = {}
        self._since: dict[int, float] = {}
        self._chosen: dict[int, int | None] = {}
        self._here: set[int] = set()

    def offer(
        self,
        party: int,
        offers: Mapping[int, Offer],
        report: Callable[[Sequence[int], set[int], int], None],
    ) -> tuple[list[int], list[int]]:
        """Wait for the decision; return the parts to send, and those of which there is no copy.

        report: called once with the parts of a decision, whose copies they are, and how many
        updates of a part are lost at most.
        """
        with self._changed:
            for number, each in offers.items():
                if number not in self._chosen:
                    self._offers.setdefault(number, {})[party] = each
                    self._since.setdefault(number, time.monotonic())
            self._changed.notify_all()
            while waiting := [number for number in offers if number not in self._chosen]:
                due = [number for number in waiting if self._is_due(number)]
                if due:
                    self._decide(due, report)
                else:
                    self._changed.wait(_LOOK_SECONDS)
        mine = [number for number in offers if self._chosen[number] == party]
        return mine, [number for number in offers if self._chosen[number] is None]

    def _is_due(self, number: int) -> bool:
        is_late = time.monotonic() - self._since[number] > WINDOW_SECONDS
        return is_late or set(self._calls.living) <= set(self._offers[number])

    def _decide(
        self, numbers: Sequence[int], report: Callable[[Sequence[int], set[int], int], None]
    ) -> None:
        most, ranks = 0, set[int]()
        for number in numbers:
            offers = self._offers.pop(number)
            self._chosen[number] = chosen = freshest(offers)
            if chosen is not None:
                ranks.add(chosen)
                most = max(most, num_lost(offers, chosen))
        self._changed.notify_all()
        report(numbers, ranks, most)

    def arrived(self, number: int) -> None:
        """Note that the value of a part is here."""
        with self._changed:
            self._here.add(number)
            self._changed.notify_all()

    def wait_for(self, number: int) -> None:
        """Wait for the value of a part that a party has to send; return at once for other parts."""
        with self._changed:
            while number in self._chosen and number not in self._here:
                chosen = self._chosen[number]
                if chosen is None or chosen in self._calls.gone:
                    raise PeerLost(
                        "kvstore: a server is lost, and so is the worker with the freshest copy of"
                        " its values; start again from a checkpoint",
                        peer=chosen,
                    )
                self._changed.wait(_LOOK_SECONDS)
