"""Where a timeline can listen: what happens to an operation from its request to its result.

The engine calls these methods at the moments they name. This class does nothing; whoever wants to
know derives from it and sets `engine.hooks`. Keys are (process set, full name). What a method does
holds up the engine, and what it raises ends it.
"""

from collections.abc import Sequence
from typing import Any

from allstep.engine.request import Ask, Key


class Hooks:
    """Does nothing."""

    def submitted(self, key: Key) -> None:
        """This rank has asked for an operation."""

    def reported(self, ask: Ask, rank: int) -> None:
        """On rank 0: a rank's ask has come."""

    def answered(self) -> None:
        """On rank 0: the coordinator tells all ranks what to do next."""

    def negotiated(self, asks: Sequence[Ask]) -> None:
        """All ranks have come; these operations are carried out now, as one, by the ranks of their
        set."""

    def refused(self, key: Key) -> None:
        """The ranks of the set do not agree on an operation: it ends with an error on all of them."""

    def begins(self, asks: Sequence[Ask]) -> None:
        """This rank begins to carry them out."""

    def activity(self, asks: Sequence[Ask], name: str) -> None:
        """Meanwhile, one thing after the other: packing, moving, unpacking."""

    def ends(self, asks: Sequence[Ask], results: Sequence[Any] | None) -> None:
        """It has carried them out, and these are the results; None: it failed."""

    def now_and_then(self) -> None:
        """Many times a second while the engine waits, for others or for something to do."""

    def stopped(self) -> None:
        """The engine has stopped."""
