"""The protocol of the object that changes the weights for an optimizer."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from allstep.parallel.exchange import Exchange, Owners
from allstep.parallel.replicas import Replicas


class Replica(Protocol):
    """The interface of the optimizer for its update (`allstep.parallel.replicated`)."""

    _replicas: Replicas
    _reduces: bool
    param_groups: list[dict[str, Any]]
    state: Any

    def _begin_step(self) -> None:
        """Announce that a step begins."""

    def _reduce_all(self) -> None:
        """Reduce all gradients on all ranks."""

    def _reduce_with(self, exchange: Exchange) -> None:
        """Combine the gradients with this exchange, with norms and clipping."""

    def _end_of_pass(self) -> None:
        """Count backward passes from zero again, since the gradients are reduced."""

    def _own_step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make the step of the wrapped class."""


class Update(Protocol):
    """Changes the weights of one optimizer, which is an argument of each call."""

    def reduce(self, optimizer: Replica) -> None:
        """Combine the gradients that this rank's update needs."""

    def use_reduced(self, optimizer: Replica) -> None:
        """Prepare `apply` for gradients that are already reduced on every rank."""

    def apply(self, optimizer: Replica, closure: Callable[[], Any] | None) -> Any:
        """Change the weights."""

    def owners(self, optimizer: Replica) -> Owners | None:
        """Return the exchange that knows the owners; None if every rank updates all weights."""

    def state_filled(self, optimizer: Replica) -> AbstractContextManager[None]:
        """Give the optimizer's `state` the values of whole parameters within the block."""

    def state_changed(self, optimizer: Replica) -> AbstractContextManager[None]:
        """Give `state` the values of whole parameters within the block, and keep changes to them.

        All ranks use it together.
        """

    def take_state(self, optimizer: Replica) -> None:
        """Take over the optimizer's `state` of whole parameters. All ranks call it together."""

    def detach(self, optimizer: Replica) -> None:
        """Release what belongs to the groups, which close next."""


class EveryRank:
    """Every rank gets all gradients and updates all weights, by the wrapped optimizer's step."""

    def reduce(self, optimizer: Replica) -> None:
        """Reduce all gradients on all ranks."""
        optimizer._reduce_all()

    def use_reduced(self, optimizer: Replica) -> None:
        """Do nothing: the wrapped optimizer uses the gradients as they are."""

    def apply(self, optimizer: Replica, closure: Callable[[], Any] | None) -> Any:
        """Make the wrapped optimizer's step."""
        return optimizer._own_step(closure)

    def owners(self, optimizer: Replica) -> Owners | None:
        """Return None: every rank updates all weights."""
        return None

    def state_filled(self, optimizer: Replica) -> AbstractContextManager[None]:
        """Do nothing: the state is always that of whole parameters."""
        return nullcontext()

    def state_changed(self, optimizer: Replica) -> AbstractContextManager[None]:
        """Do nothing: the state is always that of whole parameters."""
        return nullcontext()

    def take_state(self, optimizer: Replica) -> None:
        """Do nothing: the wrapped optimizer uses the state as it is."""

    def detach(self, optimizer: Replica) -> None:
        """Do nothing: no resources belong to a group."""
