"""`DistributedOptimizer(..., share_weights=True)`: one copy of the weights per host, each rank updates what it owns.

```
outer     what the script sees: all parameters, all parameter groups (schedulers change their rates), hooks, step()
inner     the wrapped optimizer's own class and settings, on the pieces that this rank owns, with the state of these alone
```

A step: gradients go to the owners of what they belong to, `inner` updates the shared weights, all ranks of the host meet. Optimizers that
work on each element alone (SGD, Adam, ...) get equal shares, cut anywhere; all others get whole parameters, so that norms of layers are
right. A class can say which it is by `elementwise = True` or `False`.

`synchronize()` by hand (to clip, to look) still gives every rank all gradients; the step after it then uses those.

`hvd.shutdown()` ends the sharing: each rank gets weights and whole state of its own, as without `share_weights`, and needs the memory for
them. After the next `hvd.init()` the first step shares them again.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, optim
from torch.nn import Parameter

from allstep.hvd.exceptions import HorovodInternalError
from allstep.hvd.reported_gradients import ReportedGradients
from allstep.parallel.owned_gradients import OwnedGradients
from allstep.parallel.ownership import Piece
from allstep.parallel.shared_state import SharedState, is_elementwise, memory_order
from allstep.parallel.subclass import like
from allstep.torch.gradient_group import gradient_group
from allstep.torch.optimizer import Distributed, horovods_errors

_ELEMENTWISE = {
    optim.SGD, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam, optim.RMSprop, optim.Rprop, optim.Adagrad,
    optim.Adadelta, optim.ASGD,
}  # fmt: skip


class _ReportedOwned(ReportedGradients, OwnedGradients):
    """Owned gradients that a timeline shows."""


class SharedWeights(Distributed):
    """What is added to the wrapped class instead of `Distributed`."""

    _overlap = False  # who will get the gradients is known when `step` or `synchronize` is called

    def _attach(self, *settings: Any) -> None:
        self._sharing: OwnedGradients | None = None
        super()._attach(*settings)
        self._sparse_as_dense = True  # owners add where gradients lie, so they must lie somewhere
        self._share()

    # Sharing

    @property
    def _owned(self) -> OwnedGradients:
        """The weights of the host. Where they are not shared yet, all ranks come here together and share them."""
        return self._share() if self._sharing is None else self._sharing

    def _share(self) -> OwnedGradients:
        wrapped = type(self).__bases__[1]
        whole = not getattr(wrapped, "elementwise", wrapped in _ELEMENTWISE)
        with horovods_errors():
            group = gradient_group(self.process_set)
            owned = _ReportedOwned(group, f"{self._key}/shared", self._named, self._rule(), whole)
        self._sharing = owned
        self._pieces = {piece: self._tensor_of(piece, whole) for piece in owned.own_pieces}
        self._shared_state = SharedState(owned)
        self._used: set[int] = set()  # parameters, by number, that the next update changes
        self._known: set[int] = set()  # parameters that have been updated since: their state is in shared memory
        self._given: dict[int, dict[str, Any]] = {}  # whole state from before the next step, by number
        self._inner = _optimizer_of(wrapped, self, self._pieces, owned)
        self._scatter_state()
        return owned

    def _detach_from_engine(self) -> None:
        """Each rank keeps weights and state of its own: no rank changes them now, since an update is over on all ranks at once."""
        sharing = self._sharing
        if sharing is not None:
            self._fill_state()
            sharing.make_private()
            sharing.close()
            self._sharing = None
            del self._pieces, self._shared_state, self._inner
        super()._detach_from_engine()

    def _tensor_of(self, piece: Piece, whole: bool) -> Parameter:
        owned = self._owned
        shared = (
            owned.named[piece.number].parameter.detach()
            if whole
            else owned.flats[piece.number][piece.start : piece.end]
        )
        return Parameter(shared, requires_grad=False)

    # A step

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        self._check_not_reduced("step")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._should_synchronize and not self._synchronized:
            self._reduce_what_we_update()
        else:
            self._use_what_is_there()
        self._apply()
        return loss

    def _reduce_what_we_update(self) -> None:
        owned = self._owned
        with horovods_errors():
            owned.put_back()
            self._announce()
            sparse = owned.reduce(self.weight, wanted=self._wanted())
            assert not sparse
            self._measure(owned, [])
        self._warn_if_unused(owned, sparse)
        self._used = owned.used
        self._end_of_pass()

    def _take_part(self, number: int) -> None:
        """Refuse at once: a rank that has joined owns a slice that the others' step needs it to update."""
        raise HorovodInternalError(
            "hvd.join() while other ranks still step an optimizer with share_weights=True is not supported: "
            "give every rank the same number of steps, or leave share_weights out"
        )

    def _use_what_is_there(self) -> None:
        """Every rank has all gradients already, reduced and perhaps changed by hand."""
        with horovods_errors():
            self._owned.put_back()
            self._owned.meet()  # nobody still computes with the weights that are about to change
        self._used = {i for i, each in enumerate(self._owned.named) if each.parameter.grad is not None}

    def _apply(self, closure: Callable[[], Any] | None = None) -> None:
        self._synchronized = False
        self._take_gradients(self._used)
        self._copy_settings()
        self._inner.step()
        with horovods_errors():
            self._keep_state(self._used)
            self._owned.meet()
        self._owned.tell_autograd()

    def _take_gradients(self, used: set[int]) -> None:
        for piece, tensor in self._pieces.items():
            gradient = self._owned.named[piece.number].parameter.grad
            if piece.number not in used or gradient is None:
                tensor.grad = None
            elif tensor.dim() == 1 and gradient.dim() != 1:
                tensor.grad = _flat(gradient, self._owned.named[piece.number].parameter)[piece.start : piece.end]
            else:
                tensor.grad = gradient.detach()[piece.start : piece.end] if gradient.dim() == 1 else gradient.detach()

    def _copy_settings(self) -> None:
        """Rates and the like, as schedulers have set them."""
        for inner, outer in zip(self._inner.param_groups, self.param_groups, strict=True):
            inner.update({name: value for name, value in outer.items() if name != "params"})

    def _keep_state(self, used: set[int]) -> None:
        """All ranks know which parameters were used, so all come here together when there is new state."""
        if used <= self._known:
            self._shared_state.put_back(self._pieces, self._inner.state)
        else:
            self._known |= used
            self._given = {}
            self._shared_state.gather(self._pieces, self._inner.state)

    # State

    def _scatter_state(self) -> None:
        """What the outer optimizer holds for whole parameters becomes the state of our pieces. The next step moves it to shared memory;
        until then it is kept whole as well, since the other ranks may have none (only rank 0 loaded a checkpoint)."""
        self._given = {
            i: self.state[each.parameter] for i, each in enumerate(self._owned.named) if each.parameter in self.state
        }
        self.state.clear()
        self._inner.state.clear()
        self._known.clear()
        for piece, tensor in self._pieces.items():
            parameter = self._owned.named[piece.number].parameter
            self._inner.state[tensor] = {
                key: _cut(value, piece, parameter, tensor) for key, value in self._given.get(piece.number, {}).items()
            }

    def _fill_state(self) -> None:
        """The outer optimizer's state becomes the whole one, as copies."""
        for number, values in (self._given or self._shared_state.whole()).items():
            self.state[self._owned.named[number].parameter] = dict(values)

    def state_dict(self) -> dict[str, Any]:
        """The whole state, of all parameters, from any rank alone."""
        if self._sharing is None:
            return super().state_dict()
        self._fill_state()
        try:
            return super().state_dict()
        finally:
            self.state.clear()

    @contextmanager
    def whole_state(self) -> Iterator[None]:
        """Within it `state` is that of whole parameters, and what is changed there counts afterwards. All ranks together."""
        if self._sharing is None:
            yield
            return
        self._fill_state()
        yield
        self._scatter_state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """A whole state, written by any number of ranks. All ranks load it together."""
        super().load_state_dict(state_dict)
        if self._sharing is not None:
            self._scatter_state()


def _optimizer_of(wrapped: type, outer: Any, pieces: dict[Piece, Parameter], owned: OwnedGradients) -> Any:
    """An optimizer of the wrapped class with the outer one's settings, on the pieces."""
    number_of = {id(each.parameter): number for number, each in enumerate(owned.named)}
    inner = like(outer, wrapped)
    inner.state = defaultdict(dict)
    inner.param_groups = []
    for group in outer.param_groups:
        numbers = {number_of[id(parameter)] for parameter in group["params"]}
        mine = [tensor for piece, tensor in pieces.items() if piece.number in numbers]
        inner.param_groups.append({**group, "params": mine})
    return inner


def _cut(value: Any, piece: Piece, parameter: Tensor, tensor: Tensor) -> Any:
    """The part of a parameter's state that belongs to a piece of it."""
    if not isinstance(value, Tensor) or not is_elementwise(
        tuple(value.shape), Piece(0, 0, parameter.numel()), parameter
    ):
        return value.clone() if isinstance(value, Tensor) else value
    if tensor.shape == value.shape:
        return value.clone()
    return memory_order(value, parameter)[piece.start : piece.end].clone()


def _flat(gradient: Tensor, parameter: Tensor) -> Tensor:
    if gradient.stride() != parameter.stride():
        gradient = torch.empty_like(parameter).copy_(gradient)
    return gradient.detach().as_strided((gradient.numel(),), (1,))
