"""Calls that all parties of a store make together: barriers, and texts that they compare.

A state machine with a condition: one thread for each party calls `enter`, which returns when all
others have entered, left or been lost. Each call returns the text of every party, and None for
those that are no longer there.

Calls are numbered by each party. If the server that kept them is lost, some parties may have the
answer of a call and others not, which then make it again here. A call is complete elsewhere if any
party makes a later one: then those that make it again return at once.
"""

from collections.abc import Callable
from threading import Condition
from typing import NamedTuple

from allstep.errors import CollectiveMismatch, PeerLost

LEFT, LOST = "has closed its store", "its link has ended"


class _Call(NamedTuple):
    """A call that a party has entered."""

    number: int
    what: str
    text: str


class _Result(NamedTuple):
    """What a call returns: the texts of the parties, and why the calls do not match."""

    texts: list[str | None]
    mismatch: str | None


class PartyCalls:
    """The parties of a store and their common calls.

    at_change: called when a party is gone or rests.
    """

    def __init__(self, num_parties: int, at_change: Callable[[], None]) -> None:
        self.changed = Condition()
        self.num_parties = num_parties
        self.gone: dict[int, str] = {}
        self._at_change = at_change
        self._resting: set[int] = set()
        self._entered: dict[int, _Call] = {}
        # How many calls each party has made here, for parties that do not number them.
        self._counts: dict[int, int] = {}
        self._results: dict[int, _Result] = {}

    @property
    def living(self) -> list[int]:
        """The parties that have neither left nor been lost."""
        return [party for party in range(self.num_parties) if party not in self.gone]

    def idle(self) -> set[int]:
        """Return the parties that push nothing: gone, or in a barrier."""
        return {*self.gone, *self._resting}

    def rest(self, party: int, *, is_resting: bool) -> None:
        """Note that a party begins or ends to wait in a barrier."""
        (self._resting.add if is_resting else self._resting.discard)(party)
        self._at_change()

    def leave(self, party: int, why: str) -> None:
        """Count a party as gone; the first reason stays."""
        with self.changed:
            self.gone.setdefault(party, why)
            self._entered.pop(party, None)
            self._complete()
            self.changed.notify_all()
        self._at_change()

    def enter(
        self, party: int, what: str, text: str, *, needs_all: bool, number: int = 0
    ) -> list[str | None]:
        """Wait until all living parties have entered; return the text of each party.

        what: the call, which must be the same for all. needs_all: raise PeerLost if one is gone.
        number: that of the call, from 1; 0: the party's next one here.
        """
        with self.changed:
            self._counts[party] = number or self._counts.get(party, 0) + 1
            self._entered[party] = _Call(self._counts[party], what, text)
            self._complete()
            self.changed.notify_all()
            while party not in self._results:
                self.changed.wait(1.0)
            result = self._results.pop(party)
            if result.mismatch is not None:
                raise CollectiveMismatch(result.mismatch)
            if needs_all and None in result.texts:
                # On all living parties, so that they agree which calls they have made.
                raise self.lost(f"kvstore, {what}")
            return result.texts

    def lost(self, what: str) -> PeerLost:
        """Return the error for a call that needs a party that is gone."""
        # One that has left may have done so because of another that was lost.
        party = min(self.gone, key=lambda each: (self.gone[each] != LOST, each))
        return PeerLost(f"{what}: lost rank {party} ({self.gone[party]})", peer=party)

    def _complete(self) -> None:
        """End the call if all living parties have entered."""
        last = max((call.number for call in self._entered.values()), default=0)
        for party in [each for each, call in self._entered.items() if call.number < last]:
            del self._entered[party]
            self._results[party] = _Result([None] * self.num_parties, None)
        if not self._entered or set(self._entered) != set(self.living):
            return
        calls = {party: call.what for party, call in self._entered.items()}
        first, *others = sorted(calls)
        other = next((party for party in others if calls[party] != calls[first]), None)
        mismatch = (
            None
            if other is None
            else f"kvstore: rank {first} calls {calls[first]} and rank {other} calls"
            f" {calls[other]}; all workers make these calls in the same order"
        )
        texts = [
            self._entered[party].text if party in self._entered else None
            for party in range(self.num_parties)
        ]
        self._results.update({party: _Result(texts, mismatch) for party in self._entered})
        self._entered = {}
        self.changed.notify_all()
