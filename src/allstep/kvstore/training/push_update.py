"""`PushUpdate`: an optimizer's step is a push to the shared model. `share_model` makes both."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from allstep.comm.group.init import at_shutdown
from allstep.comm.group.process_group import AllstepGroup
from allstep.errors import UserError
from allstep.kvstore.memory.parties import Parties
from allstep.kvstore.training.layout import Layout
from allstep.kvstore.training.options import Options
from allstep.kvstore.training.shared_model import SharedModel
from allstep.kvstore.training.unit_updates import StateLayout
from allstep.parallel.exchange import Owners
from allstep.parallel.replicated import ReplicatedOptimizer
from allstep.parallel.updates.by_owners import needs_whole_parameters
from allstep.parallel.updates.update import Replica


class PushUpdate:
    """Pushes the own gradient of a party; implements `parallel.updates.Update`."""

    state_is_per_rank = False

    def __init__(self, shared: SharedModel) -> None:
        self._shared: SharedModel | None = shared

    def start(self, optimizer: Replica) -> None:
        """Do nothing: `share_model` has made what the parties share."""

    def reduces_gradients(self, optimizer: Replica) -> bool:
        """Return False: each party pushes its own."""
        return False

    def gradient_group(self, optimizer: Replica) -> AllstepGroup:
        """Return the group of all ranks."""
        return optimizer._replicas.group()

    def reduce(self, optimizer: Replica) -> None:
        """Measure and clip the own gradient; the optimizer of a party reduces nothing."""
        optimizer._reduce_all()

    def use_reduced(self, optimizer: Replica) -> None:
        """Do nothing: gradients are used as they are."""

    def apply(self, optimizer: Replica, closure: Callable[[], Any] | None) -> Any:
        """Push the gradients; the parameters are the newest weights afterwards."""
        if self._shared is None:
            raise UserError("optimizer.apply(): the shared model is closed; call share_model again")
        self._shared.step()

    def synchronize(self, optimizer: Replica) -> None:
        """Do nothing: weights are equal after `SharedModel.synchronize`."""

    def participate(self, optimizer: Replica) -> None:
        """Do nothing: no party waits for a step of another one here."""

    def gather_state(self, optimizer: Replica) -> None:
        """Do nothing: all parties have one state."""

    def owners(self, optimizer: Replica) -> Owners | None:
        """Return None: every party updates all weights."""
        return None

    @contextmanager
    def state_filled(self, optimizer: Replica) -> Iterator[None]:
        """Let `optimizer.state` hold copies of the whole state within the block."""
        if self._shared is None:
            yield
            return
        self._fill(optimizer)
        try:
            yield
        finally:
            optimizer.state.clear()

    @contextmanager
    def state_changed(self, optimizer: Replica) -> Iterator[None]:
        """Make `optimizer.state` whole within the block, and share changes to it."""
        if self._shared is not None:
            self._fill(optimizer)
        yield
        self.take_state(optimizer)

    def take_state(self, optimizer: Replica) -> None:
        """Share the state of whole parameters that the leader has in `optimizer.state`."""
        if self._shared is not None:
            self._shared.take_state(optimizer.state)
            optimizer.state.clear()

    def detach(self, optimizer: Replica) -> None:
        """Give this party weights and state of its own, and leave the others."""
        shared = self._shared
        if shared is not None:
            self._fill(optimizer)
            self._shared = None
            shared.close()

    def _fill(self, optimizer: Replica) -> None:
        assert self._shared is not None
        named = optimizer._replicas.named
        for number, values in self._shared.state().items():
            optimizer.state[named[number].parameter] = values


def share_model(
    optimizer: ReplicatedOptimizer,
    wrapped: type,
    options: Options,
    averaged: Sequence[Tensor] = (),
) -> SharedModel:
    """Share the weights of an optimizer with the other parties of the host. A collective.

    optimizer: made by `replicate(..., size=1)`; from now on its `apply` pushes. wrapped: the class
    that it wraps. averaged: see `SharedModel`.
    """
    parties = Parties(f"sync={options.mode}")
    try:
        groups = [group["params"] for group in optimizer.param_groups]
        layout = Layout(groups, optimizer._replicas.named, needs_whole_parameters(wrapped))
        plan = StateLayout(optimizer, wrapped, layout)
        shared = SharedModel(parties, optimizer, wrapped, plan, options, averaged)
    except BaseException:
        parties.close()
        raise
    optimizer.state.clear()
    optimizer._replica_update = PushUpdate(shared)
    at_shutdown(optimizer.close)
    return shared
