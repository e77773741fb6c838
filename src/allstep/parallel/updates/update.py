"""The protocol of the object that changes the weights for an optimizer."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from allstep.comm.group.process_group import AllstepGroup
from allstep.parallel.exchange import Exchange, Owners
from allstep.parallel.replicas import Replicas
from allstep.parallel.traffic import Traffic


class Replica(Protocol):
    """The interface of the optimizer for its update (`allstep.parallel.replicated`)."""

    _replicas: Replicas
    _reduces: bool
    _last_weight: float | None
    """Samples behind the gradients that were reduced last, if the caller gave them."""
    param_groups: list[dict[str, Any]]
    state: Any
    traffic: Traffic
    """Counts the bytes of exchanges."""

    def _begin_step(self) -> None:
        """Announce that a step begins."""

    def _reduce_all(self) -> None:
        """Reduce all gradients on all ranks."""

    def _reduce_with(self, exchange: Exchange) -> None:
        """Combine the gradients with this exchange, with norms and clipping."""

    def _participate_in_reduction(self) -> None:
        """Contribute nothing to a reduction of all gradients by the other ranks."""

    def _drop_exchange(self) -> None:
        """Drop the exchange that reduces all gradients, and what it has started."""

    def _end_of_pass(self) -> None:
        """Count backward passes from zero again, since the gradients are reduced."""

    def _own_step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make the step of the wrapped class."""


class Update(Protocol):
    """Changes the weights of one optimizer, which is an argument of each call."""

    @property
    def state_is_per_rank(self) -> bool:
        """Whether ranks have optimizer state of their own, which `gather_state` collects."""

    def start(self, optimizer: Replica) -> None:
        """Make what the ranks share. All ranks of a world of several call it together."""

    def reduces_gradients(self, optimizer: Replica) -> bool:
        """Return whether a step combines the gradients of the ranks."""

    def gradient_group(self, optimizer: Replica) -> AllstepGroup:
        """Return the group over which a step combines gradients, if it does."""

    def reduce(self, optimizer: Replica) -> None:
        """Combine the gradients that this rank's update needs."""

    def use_reduced(self, optimizer: Replica) -> None:
        """Prepare `apply` for gradients that are already reduced on every rank."""

    def apply(self, optimizer: Replica, closure: Callable[[], Any] | None) -> Any:
        """Change the weights."""

    def synchronize(self, optimizer: Replica) -> None:
        """Make the weights equal on all ranks. All ranks call it together."""

    def participate(self, optimizer: Replica) -> None:
        """Answer what the other ranks do in `reduce`, `apply` or `synchronize`, without a step.

        Called on a rank that has no more steps to make.
        """

    def owners(self, optimizer: Replica) -> Owners | None:
        """Return the exchange that knows the owners; None if every rank updates all weights."""

    def gather_state(self, optimizer: Replica) -> None:
        """Collect the state of all ranks on the first one. All ranks call it together."""

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

    state_is_per_rank = False

    def start(self, optimizer: Replica) -> None:
        """Do nothing: the ranks share no weights."""

    def reduces_gradients(self, optimizer: Replica) -> bool:
        """Return True."""
        return True

    def gradient_group(self, optimizer: Replica) -> AllstepGroup:
        """Return the group of all ranks."""
        return optimizer._replicas.group()

    def reduce(self, optimizer: Replica) -> None:
        """Reduce all gradients on all ranks."""
        optimizer._reduce_all()

    def use_reduced(self, optimizer: Replica) -> None:
        """Do nothing: the wrapped optimizer uses the gradients as they are."""

    def apply(self, optimizer: Replica, closure: Callable[[], Any] | None) -> Any:
        """Make the wrapped optimizer's step."""
        return optimizer._own_step(closure)

    def synchronize(self, optimizer: Replica) -> None:
        """Do nothing: every step makes the same change on all ranks."""

    def participate(self, optimizer: Replica) -> None:
        """Contribute nothing to a reduction."""
        optimizer._participate_in_reduction()

    def owners(self, optimizer: Replica) -> Owners | None:
        """Return None: every rank updates all weights."""
        return None

    def gather_state(self, optimizer: Replica) -> None:
        """Do nothing: all ranks have the same state."""

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
