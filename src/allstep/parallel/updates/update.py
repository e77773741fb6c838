"""What an optimizer asks of the object that changes the weights."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from allstep.parallel.exchange import Exchange, Owners
from allstep.parallel.replicas import Replicas


class Replica(Protocol):
    """What an update asks of the optimizer (`allstep.parallel.replicated`)."""

    _replicas: Replicas
    param_groups: list[dict[str, Any]]
    state: Any

    def _begin_step(self) -> None:
        """Tell that a step begins."""

    def _reduce_all(self) -> None:
        """Bring all gradients to all ranks."""

    def _reduce_with(self, exchange: Exchange) -> None:
        """Bring the gradients together as this exchange does, with norms and clipping."""

    def _end_of_pass(self) -> None:
        """The gradients are reduced: count backward passes from zero."""

    def _own_step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take the step of the wrapped class."""


class Update(Protocol):
    """Changes the weights of one optimizer, which hands itself over with each call."""

    def reduce(self, optimizer: Replica) -> None:
        """Bring together the gradients that this rank's update needs."""

    def use_reduced(self, optimizer: Replica) -> None:
        """Every rank has all gradients already, reduced and perhaps changed by hand:

        `apply` shall use those.
        """

    def apply(self, optimizer: Replica, closure: Callable[[], Any] | None) -> Any:
        """Change the weights."""

    def owners(self, optimizer: Replica) -> Owners | None:
        """Who updates what; None where every rank updates all."""

    def state_filled(self, optimizer: Replica) -> AbstractContextManager[None]:
        """Within it the optimizer's `state` is that of whole parameters."""

    def state_changed(self, optimizer: Replica) -> AbstractContextManager[None]:
        """Within it `state` is that of whole parameters, and what is changed there counts
        afterwards. All ranks together."""

    def take_state(self, optimizer: Replica) -> None:
        """The optimizer's `state` of whole parameters counts from now on. All ranks together."""

    def detach(self, optimizer: Replica) -> None:
        """The groups close: give back what belongs to them."""


class EveryRank:
    """Every rank gets all gradients and updates all weights, by the wrapped optimizer's own step."""

    def reduce(self, optimizer: Replica) -> None:
        """Bring all gradients together."""
        optimizer._reduce_all()

    def use_reduced(self, optimizer: Replica) -> None:
        """They are where the step looks for them."""

    def apply(self, optimizer: Replica, closure: Callable[[], Any] | None) -> Any:
        """Take the wrapped optimizer's step."""
        return optimizer._own_step(closure)

    def owners(self, optimizer: Replica) -> Owners | None:
        """Every rank updates all."""
        return None

    def state_filled(self, optimizer: Replica) -> AbstractContextManager[None]:
        """It always is."""
        return nullcontext()

    def state_changed(self, optimizer: Replica) -> AbstractContextManager[None]:
        """It always is."""
        return nullcontext()

    def take_state(self, optimizer: Replica) -> None:
        """It is where it belongs."""

    def detach(self, optimizer: Replica) -> None:
        """There is nothing to give back."""
