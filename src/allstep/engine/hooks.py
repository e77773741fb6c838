"""The events of an operation from its request to its result, for a timeline.

The engine calls these methods at the moments that they describe. This class does nothing: a
listener derives from it and is set as `engine.hooks`. Keys are (process set, full name). A method
delays the engine while it runs, and an exception in it stops the engine.
"""

from collections.abc import Sequence
from typing import Any

from allstep.engine.request import Key, RequestSpec


class Hooks:
    """A listener that does nothing."""

    def submitted(self, key: Key) -> None:
        """Called when this rank has requested an operation."""

    def reported(self, spec: RequestSpec, rank: int) -> None:
        """Called on rank 0 when the request of a rank has arrived."""

    def answered(self) -> None:
        """Called on rank 0 when the coordinator sends answers to all ranks."""

    def negotiated(self, specs: Sequence[RequestSpec]) -> None:
        """Called when all ranks have requested these operations, which then run as one."""

    def refused(self, key: Key) -> None:
        """Called when the requests of an operation differ: it ends with an error on all ranks."""

    def begins(self, specs: Sequence[RequestSpec]) -> None:
        """Called when this rank begins to run these operations."""

    def activity(self, specs: Sequence[RequestSpec], name: str) -> None:
        """Called for each phase of a running operation: packing, communication, unpacking."""

    def ends(self, specs: Sequence[RequestSpec], results: Sequence[Any] | None) -> None:
        """Called when the operations have ended on this rank; `results` is None after a failure."""

    def tick(self) -> None:
        """Called many times a second while the engine waits for other ranks or for requests."""

    def stopped(self) -> None:
        """Called when the engine has stopped."""
