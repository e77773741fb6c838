"""Where a timeline can listen: what happens to an operation from its request to its result.

The engine calls these methods at the moments they name. This class does nothing; whoever wants to know derives from it and sets
`engine.hooks`. Keys are (process set, full name).
"""

from collections.abc import Sequence

from allstep.comm.engine.request import Ask, Key


class Hooks:
    """Does nothing."""

    def submitted(self, key: Key) -> None:
        """This rank has asked for an operation."""

    def reported(self, key: Key, rank: int) -> None:
        """On rank 0: a rank's ask has come."""

    def negotiated(self, asks: Sequence[Ask]) -> None:
        """All ranks have come; these operations are carried out now, as one."""

    def begins(self, asks: Sequence[Ask]) -> None:
        """This rank begins to carry them out."""

    def activity(self, asks: Sequence[Ask], name: str) -> None:
        """Meanwhile, one thing after the other: packing, moving, unpacking."""

    def ends(self, asks: Sequence[Ask], error: BaseException | None) -> None:
        """It has carried them out, or failed."""

    def stopped(self) -> None:
        """The engine has stopped."""
