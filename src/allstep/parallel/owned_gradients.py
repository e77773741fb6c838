"""One copy of the weights for all ranks of a host, and gradients that go to whoever updates them.

```
host        weights in shared memory: every rank's parameters are views of it
            | conv1 | conv2 |        fc1        | fc2 |
            |<------ rank 0 ------>|<------ rank 1 ------>|        each owner has the optimizer's state of its pieces, and updates them
```

A step: gradients of what others own are delivered to them (`delivering`), sums cross to the other hosts, owners update, all meet. Nothing
is copied back: what the owner writes is everybody's weight.

A parameter that lost its place (`model.to(...)`, `load_state_dict(assign=True)`, `p.data = ...`) is put back with its new values, as long
as shape and dtype are the same; else that is an error.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore
from torch.nn import Parameter

from allstep.comm.group.plan import call_of
from allstep.comm.group.process_group import AllstepGroup
from allstep.comm.group.shared_memory import LocalMover
from allstep.comm.memory.arena import Arena
from allstep.comm.memory.segment import share
from allstep.comm.op.norms import share_of
from allstep.errors import CommError, UserError
from allstep.limits import read_limits
from allstep.parallel.gradients import LARGE, Bucket, Gradients, Named, Rule
from allstep.parallel.ownership import Piece, by_elements, by_whole_parameters
from allstep.parallel.pack import Pack, dense_strides, flat_in_memory
from allstep.parallel.to_owners import Schedule, deliver

_ALIGNED = 64  # bytes


class OwnedGradients(Gradients):
    """Weights in memory that the host's ranks share; `reduce` leaves in each rank's gradients the sums of the pieces that it owns.

    whole: give owners whole parameters, for optimizers that look at more than one element at a time.
    """

    def __init__(self, group: AllstepGroup, key: str, named: Sequence[Named], rule: Rule, whole: bool) -> None:
        super().__init__(group, key, named, rule, overlap=False)
        local = group.local
        if not isinstance(local, LocalMover):
            raise CommError(
                "share_weights needs ranks that can share memory; `allstep doctor` says why they cannot",
                rank=group.rank(),
            )
        self.local = local
        self._whole = whole
        self._meeting = call_of(f"shared weights {key}")
        self._agree()
        self._share_weights()

    @property
    def arena(self) -> Arena:
        return self.local.arena

    def meet(self) -> None:
        """All ranks of the host are here, and see what the others have written."""
        self.local.carry_out(self._meeting, lambda arena: arena.meet(self._meeting))

    # Weights

    def _share_weights(self) -> None:
        _check(self.named)
        starts, total = [], 0
        for each in self.named:
            starts.append(total)
            nbytes = each.parameter.numel() * each.parameter.element_size()
            total += -(-max(nbytes, 1) // _ALIGNED) * _ALIGNED
        store = PrefixStore(f"weights/{self.key}/{self.local.layout.host}", self.group.get_group_store())
        try:
            segment = share(store, self.arena.rank, self.arena.size, total, read_limits().start)
        except CommError as error:
            raise CommError(f"share_weights: {total} bytes of weights: {error}", rank=self.group.rank()) from error
        self.flats = [
            torch.frombuffer(segment.view, dtype=each.parameter.dtype, count=each.parameter.numel(), offset=start)
            if each.parameter.numel()
            else each.parameter.detach().view(-1)
            for each, start in zip(self.named, starts, strict=True)
        ]
        self._views = [_like(flat, each.parameter) for flat, each in zip(self.flats, self.named, strict=True)]
        if self.arena.rank == 0:
            for view, each in zip(self._views, self.named, strict=True):
                view.copy_(each.parameter.detach())
        self.meet()
        for view, each in zip(self._views, self.named, strict=True):
            each.parameter.data = view

    def put_back(self) -> None:
        """Parameters that were given other memory return to the shared one, with their values."""
        for view, each in zip(self._views, self.named, strict=True):
            parameter = each.parameter
            if parameter.data_ptr() == view.data_ptr() or not parameter.numel():
                continue
            if parameter.shape != view.shape or parameter.dtype != view.dtype:
                raise UserError(
                    f"share_weights: parameter {each.name!r} was {view.dtype} {list(view.shape)} and is now {parameter.dtype} "
                    f"{list(parameter.shape)}: change the model before DistributedOptimizer is made"
                )
            view.copy_(parameter.detach())
            parameter.data = view

    def make_private(self) -> None:
        """The opposite of sharing: parameters become memory of this rank alone, with the values that they have."""
        for view, each in zip(self._views, self.named, strict=True):
            if each.parameter.data_ptr() == view.data_ptr() and each.parameter.numel():
                each.parameter.data = view.clone()
        self.flats, self._views = [], []

    def tell_autograd(self) -> None:
        """The weights have changed, also those that another process wrote: a graph from before must not be used any more."""
        for each in self.named:
            parameter = each.parameter
            torch._C._autograd._unsafe_set_version_counter((parameter,), (parameter._version + 1,))

    # Gradients

    def _lay_out(self) -> None:
        super()._lay_out()
        num_owners = self.local.layout.num_lanes or self.arena.size
        sizes = [each.parameter.numel() for each in self.named]
        deal = by_whole_parameters if self._whole else by_elements
        self.owned: list[list[Piece]] = deal(sizes, num_owners)
        dtypes = dict.fromkeys(each.parameter.dtype for each in self.named)
        self._schedules = {dtype: Schedule(self.arena, self._owned_of(dtype), dtype) for dtype in dtypes}

    def _owned_of(self, dtype: torch.dtype) -> list[list[Piece]]:
        return [[piece for piece in share if self.named[piece.number].parameter.dtype == dtype] for share in self.owned]

    @property
    def own_pieces(self) -> list[Piece]:
        """What this rank updates."""
        return self.owned[self.arena.rank] if self.arena.rank < len(self.owned) else []

    def _make_packs(self, bucket: Bucket) -> list[Pack]:
        return []

    def _gradient(self, number: int, scale: float, absent: bool) -> Tensor:
        parameter = self.named[number].parameter
        if not absent and parameter.grad is not None and parameter.grad.stride() != self._views[number].stride():
            parameter.grad = torch.empty_like(parameter).copy_(parameter.grad)
        return super()._gradient(number, scale, absent)

    def _sum(self, bucket: Bucket, gradients: dict[int, Tensor], scale: float) -> None:
        for dtype, schedule in self._schedules.items():
            flats = {
                number: flat_in_memory(gradient) for number, gradient in gradients.items() if gradient.dtype == dtype
            }
            mean = self.mean if self.local.way is None else None  # over several hosts it is not yet the mean
            self.local.carry_out(self._meeting, deliver, schedule, flats, scale, self._meeting, self.own, mean)
        self._cross(gradients)

    def _cross(self, gradients: dict[int, Tensor]) -> None:
        """Sums of our pieces over all hosts: large ones where they lie, small ones together."""
        if self.local.way is None:
            return
        pieces = self._pieces_of(gradients)
        small: dict[torch.dtype, list[Tensor]] = {}
        for piece in pieces:
            if piece.numel() * piece.element_size() < LARGE:
                small.setdefault(piece.dtype, []).append(piece)
            else:
                self._carry(piece)
        for together in small.values():
            packed = torch.cat(together)
            self._carry(packed)
            torch._foreach_copy_(together, torch.split_with_sizes(packed, [piece.numel() for piece in together]))

    def _pieces_of(self, gradients: Mapping[int, Tensor]) -> list[Tensor]:
        """What we own of these gradients, flat."""
        return [
            flat_in_memory(gradients[number])[start:end]
            for number, start, end in self.own_pieces
            if number in gradients
        ]

    def _to_scale(self) -> list[Tensor]:
        return self._pieces_of(self._reduced())

    def _carry(self, flat: Tensor) -> None:
        self.local.carry_out(self._meeting, lambda _: self._cross_with(flat))
        if self.mean is not None:  # every host has it
            self.mean.add(share_of(flat, self.local.layout.host, len(self.local.layout.hosts)))

    def _cross_with(self, flat: Tensor) -> None:
        assert self.local.way is not None
        self.local.way.get_ready()
        self.local.way.carry(flat, torch.add)


def _check(named: Sequence[Named]) -> None:
    for name, parameter in named:
        if parameter.device.type != "cpu":
            raise UserError(
                f"share_weights: parameter {name!r} is on {parameter.device}; only memory of the host can be shared"
            )
        if not parameter.dtype.is_floating_point:
            raise UserError(
                f"share_weights: parameter {name!r} is {parameter.dtype}; only floating-point weights can be shared"
            )


def _like(flat: Tensor, parameter: Parameter) -> Tensor:
    return flat.as_strided(parameter.shape, dense_strides(parameter))
