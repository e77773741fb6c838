"""Calls that all parties of a store make together: barriers, and texts that they compare.

A state machine with a condition: one thread for each party calls `enter`, which returns when all
others have entered, left or been lost. Each call returns the text of every party, and None for
those that are no longer there.
"""

from collections.abc import Callable
from threading import Condition

from allstep.errors import CollectiveMismatch, PeerLost

LEFT, LOST = "has closed its store", "its link has ended"


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
        self._entered: dict[int, tuple[str, str]] = {}
        self._number = 0
        self._texts: list[str | None] = []
        self._mismatch: str | None = None

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

    def enter(self, party: int, what: str, text: str, *, needs_all: bool) -> list[str | None]:
        """Wait until all living parties have entered; return the text of each party.

        what: the call, which must be the same for all. needs_all: raise PeerLost if one is gone.
        """
        with self.changed:
            number = self._number
            self._entered[party] = (what, text)
            self._complete()
            self.changed.notify_all()
            while self._number == number:
                self.changed.wait(1.0)
            if self._mismatch is not None:
                raise CollectiveMismatch(self._mismatch)
            if needs_all and None in self._texts:
                # On all living parties, so that they agree which calls they have made.
                raise self.lost(f"kvstore, {what}")
            return self._texts

    def lost(self, what: str) -> PeerLost:
        """Return the error for a call that needs a party that is gone."""
        # One that has left may have done so because of another that was lost.
        party = min(self.gone, key=lambda each: (self.gone[each] != LOST, each))
        return PeerLost(f"{what}: lost rank {party} ({self.gone[party]})", peer=party)

    def _complete(self) -> None:
        """End the call if all living parties have entered."""
        if not self._entered or set(self._entered) != set(self.living):
            return
        calls = {party: what for party, (what, _) in self._entered.items()}
        first, *others = sorted(calls)
        other = next((party for party in others if calls[party] != calls[first]), None)
        self._mismatch = (
            None
            if other is None
            else f"kvstore: rank {first} calls {calls[first]} and rank {other} calls"
            f" {calls[other]}; all workers make these calls in the same order"
        )
        self._texts = [
            self._entered[party][1] if party in self._entered else None
            for party in range(self.num_parties)
        ]
        self._entered = {}
        self._number += 1
        self.changed.notify_all()
