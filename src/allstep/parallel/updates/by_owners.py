"""`ByOwners`: one copy of the weights per host, each rank updates what it owns.

```
outer     what the script sees: all parameters, all parameter groups (in which schedulers change
          learning rates), hooks, step()
inner     the wrapped optimizer's own class and settings, on the ranges that this rank owns, with
          the state of these alone
```

In a step, gradients are summed for the owners of their ranges, `inner` updates the shared weights,
and all ranks of the host wait for each other. Optimizers that treat each element separately (SGD,
Adam, ...) get equal shares, divided anywhere; all others get whole parameters, so that norms of
layers are right. A class can declare it by `elementwise = True` or `False`.

Gradients that every rank has already (reduced by the caller, for example to clip them) are used as
they are.

`detach` ends the sharing: each rank gets weights and whole state of its own, and needs the memory
for them. The next step shares them again.

With several hosts each host has such owners, which update alike; or each element has one owner in
the run (`one_in_run`), which sends the new weights to the other hosts: a synchronous parameter
server, whose servers are the owners. Its state is then on one host only, and `gather_state` copies
it to the others, for a checkpoint.

In an elastic run a rank may be lost within its update. Each rank then copies what it owns before it
changes it (`undo`), so that `detach` returns to the last update that this rank has finished. A
world of one rank shares nothing: the update is that of the wrapped class.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, optim
from torch.nn import Parameter

from allstep.comm.group.process_group import AllstepGroup
from allstep.compression import Codec
from allstep.errors import UserError
from allstep.parallel.exchange.compressed_owners import CompressedOwners
from allstep.parallel.exchange.owner_ranges import ParameterRange
from allstep.parallel.exchange.owners import Owners
from allstep.parallel.exchange.parameter_order import Named
from allstep.parallel.subclass import like
from allstep.parallel.updates.shared_parameters import SharedParameters
from allstep.parallel.updates.shared_state import SharedState, is_elementwise, memory_order
from allstep.parallel.updates.update import Replica

_ELEMENTWISE = {
    optim.SGD, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam, optim.RMSprop,
    optim.Rprop, optim.Adagrad, optim.Adadelta, optim.ASGD,
}  # fmt: skip


def needs_whole_parameters(optimizer: type) -> bool:
    """Return whether a class of optimizers updates whole parameters only, as for norms of layers.

    A class declares it by `elementwise`; without that, classes of torch are known.
    """
    return not getattr(optimizer, "elementwise", optimizer in _ELEMENTWISE)


class ByOwners:
    """Each rank updates its ranges of weights that the host's ranks share.

    `wrapped`: the optimizer's own class. `keeps_undo`: a rank may be lost within its update, which
    is then undone. `one_in_run`: with several hosts, one owner for each element; not in an elastic
    run, since a host that is lost takes its state along. `codec`: encodes what hosts exchange; only
    without `one_in_run`.
    """

    def __init__(
        self,
        wrapped: type,
        keeps_undo: bool = False,
        one_in_run: bool = False,
        codec: Codec | None = None,
    ) -> None:
        self._wrapped, self._keeps_undo, self._one_in_run = wrapped, keeps_undo, one_in_run
        self._codec = codec
        self._whole = needs_whole_parameters(wrapped)
        self._sharing: _Sharing | None = None

    @property
    def state_is_per_rank(self) -> bool:
        """Whether hosts have optimizer state of their own."""
        return self._sharing is not None and self._sharing.owners.one_in_run

    def sharing(self, optimizer: Replica) -> "_Sharing":
        """Return the shared weights of the host.

        If they are not shared yet, all ranks call it together and share them.
        """
        if self._sharing is None:
            owners = self._owners(optimizer)
            self._sharing = _Sharing(
                owners, self._wrapped, optimizer, self._whole, self._keeps_undo
            )
            self.take_state(optimizer)
        return self._sharing

    def _owners(self, optimizer: Replica) -> Owners:
        each = optimizer._replicas
        what = each.group(), f"{each.key()}/shared", each.named, each.rule, self._whole
        if self._codec is not None:
            return CompressedOwners(*what, self._codec, each.listener)
        return Owners(*what, each.listener, self._one_in_run)

    def start(self, optimizer: Replica) -> None:
        """Share the weights of the host."""
        self.sharing(optimizer)

    def reduces_gradients(self, optimizer: Replica) -> bool:
        """Return True."""
        return True

    def gradient_group(self, optimizer: Replica) -> AllstepGroup:
        """Return the group of all ranks."""
        return optimizer._replicas.group()

    def reduce(self, optimizer: Replica) -> None:
        """Sum the gradients for their owners."""
        if self._is_alone(optimizer):
            optimizer._reduce_all()
            return
        sharing = self.sharing(optimizer)
        sharing.parameters.put_back()
        optimizer._begin_step()
        optimizer._reduce_with(sharing.owners)
        sharing.used = sharing.owners.used
        optimizer._end_of_pass()

    def use_reduced(self, optimizer: Replica) -> None:
        """Use the present gradients, which are reduced already."""
        sharing = self.sharing(optimizer)
        sharing.parameters.put_back()
        # Until all ranks are here, one may still compute with the weights that will change.
        sharing.owners.meet()
        sharing.used = {
            i for i, each in enumerate(sharing.owners.named) if each.parameter.grad is not None
        }

    def apply(self, optimizer: Replica, closure: Callable[[], Any] | None) -> Any:
        """Update our ranges; the other ranks update theirs at the same time."""
        if self._is_alone(optimizer):
            return optimizer._own_step(closure)
        self.sharing(optimizer).update(optimizer)
        return None

    def synchronize(self, optimizer: Replica) -> None:
        """Do nothing: an update ends on all ranks at once."""

    def participate(self, optimizer: Replica) -> None:
        """Raise UserError: the other ranks' step needs this rank to update what it owns."""
        raise UserError(
            "a rank without further steps cannot leave a step with shared weights to the others:"
            " give every rank the same number of steps, or leave share_weights out"
        )

    def owners(self, optimizer: Replica) -> Owners | None:
        """Return the exchange that knows the owners; None in a world of one rank."""
        return None if self._is_alone(optimizer) else self.sharing(optimizer).owners

    def _is_alone(self, optimizer: Replica) -> bool:
        """Return whether an elastic run has only this rank left."""
        return self._keeps_undo and not optimizer._reduces

    # The optimizer's state

    def gather_state(self, optimizer: Replica) -> None:
        """Copy the state of each owner to the hosts that do not have it."""
        if self._sharing is not None:
            self._sharing.gather_state()

    @contextmanager
    def state_filled(self, optimizer: Replica) -> Iterator[None]:
        """Let `optimizer.state` hold copies of the whole state within the block."""
        if self._sharing is None:
            yield
            return
        self._sharing.check_whole()
        self._sharing.fill(optimizer.state)
        try:
            yield
        finally:
            optimizer.state.clear()

    @contextmanager
    def state_changed(self, optimizer: Replica) -> Iterator[None]:
        """Make `optimizer.state` whole within the block; then divide it into ranges again."""
        if self._sharing is not None:
            self._sharing.check_whole()
            self._sharing.fill(optimizer.state)
        yield
        self.take_state(optimizer)

    def take_state(self, optimizer: Replica) -> None:
        """Divide the state of whole parameters into the state of our ranges."""
        if self._sharing is not None:
            self._sharing.scatter(optimizer.state)

    def detach(self, optimizer: Replica) -> None:
        """Give each rank weights and state of its own.

        No rank changes them meanwhile, since an update ends on all ranks at once; except if a rank
        is lost, after which an update that this rank has not finished is undone. State that other
        hosts have, and `gather_state` has not copied, ends with them: the optimizer has none then.
        """
        sharing, self._sharing = self._sharing, None
        if sharing is not None:
            if sharing.is_whole:
                sharing.fill(optimizer.state)
            sharing.parameters.make_private()
            sharing.owners.close()


class _Sharing:
    """Weights and state while they are shared."""

    def __init__(
        self, owners: Owners, wrapped: type, optimizer: Replica, whole: bool, keeps_undo: bool
    ) -> None:
        self.owners = owners
        self.parameters = SharedParameters(owners, keeps_undo)
        self.ranges = {span: self._tensor_of(span, whole) for span in owners.own_ranges}
        # The numbers of the parameters that the next update changes.
        self.used: set[int] = set()
        self.inner = _optimizer_of(wrapped, optimizer, self.ranges, owners.named)
        self._state = SharedState(owners, self.parameters.undo)
        # Parameters that have been updated since: their state is in shared memory.
        self._known: set[int] = set()
        # Whether the memory of this host has the state of all owners.
        self.is_whole = True
        # The whole state from before the next step, by number.
        self._given: dict[int, dict[str, Any]] = {}

    def _tensor_of(self, span: ParameterRange, whole: bool) -> Parameter:
        named, flats = self.owners.named, self.parameters.flats
        shared = (
            named[span.number].parameter.detach()
            if whole
            else flats[span.number][span.start : span.end]
        )
        return Parameter(shared, requires_grad=False)

    def update(self, outer: Replica) -> None:
        """Make the inner optimizer's step, on the gradients of the used parameters."""
        self._take_gradients()
        # Learning rates and other options, as schedulers have set them.
        for inner_group, outer_group in zip(
            self.inner.param_groups, outer.param_groups, strict=True
        ):
            inner_group.update(
                {name: value for name, value in outer_group.items() if name != "params"}
            )
        self._keep_undo()
        self.inner.step()
        self.is_whole = not self.owners.one_in_run
        self._keep_state()
        self.parameters.send_owned()
        self.owners.meet()
        self._finish()
        self.parameters.bump_versions()

    def _keep_undo(self) -> None:
        """Copy what we own, and begin to change it."""
        if self.parameters.undo is not None:
            self.parameters.keep()
            self._state.keep()
            self.parameters.undo.begin()

    def _finish(self) -> None:
        """Record that all ranks have finished the update."""
        if self._known:
            self._given = {}
        self._state.finish()
        if self.parameters.undo is not None:
            self.parameters.undo.finish()

    def _take_gradients(self) -> None:
        for span, tensor in self.ranges.items():
            gradient = self.owners.named[span.number].parameter.grad
            if span.number not in self.used or gradient is None:
                tensor.grad = None
            elif tensor.dim() == 1 and gradient.dim() != 1:
                tensor.grad = _flat(gradient, self.owners.named[span.number].parameter)[
                    span.start : span.end
                ]
            else:
                tensor.grad = (
                    gradient.detach()[span.start : span.end]
                    if gradient.dim() == 1
                    else gradient.detach()
                )

    # State

    def gather_state(self) -> None:
        """Let every host have the state of all owners, as it is now. A collective of all ranks."""
        self._state.send_owned()
        self.owners.meet()
        self.is_whole = True

    def check_whole(self) -> None:
        """Raise UserError if this host does not have the state of all owners."""
        if not self.is_whole:
            raise UserError(
                "the optimizer's state is on several hosts, each of which updates a part of the"
                " weights: call gather_state() on all ranks before"
            )

    def _keep_state(self) -> None:
        """Keep the state in shared memory.

        All ranks know which parameters were used, so they call `gather` together if there is new
        state.
        """
        if self.used <= self._known:
            self._state.put_back(self.ranges, self.inner.state)
        else:
            self._known |= self.used
            self._state.gather(self.ranges, self.inner.state)

    def scatter(self, state: dict[Any, Any]) -> None:
        """Take over the outer optimizer's state of whole parameters as the state of our ranges.

        The next step moves it to shared memory. Until then it is also kept whole, since the other
        ranks may have none (only rank 0 loaded a checkpoint).
        """
        named = self.owners.named
        self._given = {
            i: state[each.parameter] for i, each in enumerate(named) if each.parameter in state
        }
        state.clear()
        self.inner.state.clear()
        self._known.clear()
        for span, tensor in self.ranges.items():
            parameter = named[span.number].parameter
            self.inner.state[tensor] = {
                key: _cut(value, span, parameter, tensor)
                for key, value in self._given.get(span.number, {}).items()
            }

    def fill(self, state: dict[Any, Any]) -> None:
        """Set the outer optimizer's state to copies of the whole state."""
        for number, values in (self._given or self._state.whole()).items():
            state[self.owners.named[number].parameter] = dict(values)


def _optimizer_of(
    wrapped: type, outer: Any, ranges: Mapping[ParameterRange, Parameter], named: list[Named]
) -> Any:
    """Return an optimizer of the wrapped class with the outer one's settings, on the ranges."""
    number_of = {id(each.parameter): number for number, each in enumerate(named)}
    inner = like(outer, wrapped)
    inner.state = defaultdict(dict)
    inner.param_groups = []
    for group in outer.param_groups:
        numbers = {number_of[id(parameter)] for parameter in group["params"]}
        mine = [tensor for span, tensor in ranges.items() if span.number in numbers]
        inner.param_groups.append({**group, "params": mine})
    return inner


def _cut(value: Any, span: ParameterRange, parameter: Tensor, tensor: Tensor) -> Any:
    """Return the part of a parameter's state that belongs to a range of it."""
    if not isinstance(value, Tensor) or not is_elementwise(
        tuple(value.shape), ParameterRange(0, 0, parameter.numel()), parameter
    ):
        return value.clone() if isinstance(value, Tensor) else value
    if tensor.shape == value.shape:
        return value.clone()
    return memory_order(value, parameter)[span.start : span.end].clone()


def _flat(gradient: Tensor, parameter: Tensor) -> Tensor:
    if gradient.stride() != parameter.stride():
        gradient = torch.empty_like(parameter).copy_(gradient)
    return gradient.detach().as_strided((gradient.numel(),), (1,))
