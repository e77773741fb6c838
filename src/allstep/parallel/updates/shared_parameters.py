"""One copy of the weights for all ranks of a host.

```
host        weights in shared memory: every rank's parameters are views of it
            | conv1 | conv2 |        fc1        | fc2 |
            |<------ rank 0 ------>|<------ rank 1 ------>|   each owner updates its ranges, and
                                                              so the weights of all ranks
```

A parameter that was moved elsewhere (`model.to(...)`, `load_state_dict(assign=True)`,
`p.data = ...`) is moved back with its new values, if shape and dtype are the same; else that is an
error.

In an elastic run the memory also has an undo copy of the weights, and the numbers that show which
owner needs it (`undo`).
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore
from torch.nn import Parameter

from allstep.comm.memory.segment import CannotShare, Segment, share
from allstep.errors import CommError, UserError
from allstep.limits import read_limits
from allstep.parallel.exchange.buckets import nbytes_of
from allstep.parallel.exchange.owners import Owners
from allstep.parallel.exchange.packed_gradients import dense_strides, flat_in_memory
from allstep.parallel.exchange.parameter_order import Named
from allstep.parallel.updates.undo import Undo, number_bytes

# Bytes.
_ALIGNED = 64


class SharedParameters:
    """The parameters of an exchange in memory that the ranks of the host share.

    All ranks of the host make it together. The values are those of the host's first rank.
    `keeps_undo`: add an undo copy, for an elastic run.
    """

    def __init__(self, owners: Owners, keeps_undo: bool = False) -> None:
        self._owners = owners
        _check(owners.named)
        starts, total = _places(owners.named)
        arena = owners.local.arena
        more = total + number_bytes(arena.size) if keeps_undo else 0
        memory = self._segment(total + more).view
        self.flats = _flats(owners.named, memory, starts)
        self._copies = _flats(owners.named, memory[total:], starts) if keeps_undo else []
        self.undo = Undo(memory[2 * total :], arena.rank) if keeps_undo else None
        self._views = [
            _like(flat, each.parameter) for flat, each in zip(self.flats, owners.named, strict=True)
        ]
        if arena.rank == 0:
            for view, each in zip(self._views, owners.named, strict=True):
                view.copy_(each.parameter.detach())
        owners.meet()
        for view, each in zip(self._views, owners.named, strict=True):
            each.parameter.data = view

    def _segment(self, nbytes: int) -> Segment:
        """Return memory that all ranks of the host have mapped."""
        owners, local = self._owners, self._owners.local
        store = PrefixStore(
            f"weights/{owners.key}/{local.layout.host}", owners.group.get_group_store()
        )
        check = owners.group.guard.check_for("share_weights")
        seconds = read_limits().start
        try:
            return share(store, local.arena.rank, local.arena.size, nbytes, seconds, check)
        except CannotShare as error:
            raise CommError(
                f"share_weights: {nbytes} bytes of weights: {error}", rank=owners.group.rank()
            ) from error

    def keep(self) -> None:
        """Copy our ranges to the undo copy."""
        own = self._owners.own_ranges
        if own:
            torch._foreach_copy_(
                [self._copies[number][start:end] for number, start, end in own],
                [self.flats[number][start:end] for number, start, end in own],
            )

    def put_back(self) -> None:
        """Move parameters in other memory back to the shared memory, with their values."""
        for view, each in zip(self._views, self._owners.named, strict=True):
            parameter = each.parameter
            if parameter.data_ptr() == view.data_ptr() or not parameter.numel():
                continue
            if parameter.shape != view.shape or parameter.dtype != view.dtype:
                raise UserError(
                    f"share_weights: parameter {each.name!r} was {view.dtype} {list(view.shape)}"
                    f" and is now {parameter.dtype} {list(parameter.shape)}: change the model"
                    " before DistributedOptimizer is made"
                )
            view.copy_(parameter.detach())
            parameter.data = view

    def send_owned(self) -> None:
        """Receive the weights that other hosts own, and send them ours. A collective."""
        ranges = self._owners.ranges_by_host
        if ranges:
            self._owners.send_owned(
                [[self.flats[number][start:end] for number, start, end in each] for each in ranges]
            )

    def make_private(self) -> None:
        """End the sharing: copy the parameters to memory of this rank alone.

        With an undo copy, these are the values after the last update that this rank has finished.
        """
        private = {
            number: view.clone()
            for number, (view, each) in enumerate(zip(self._views, self._owners.named, strict=True))
            if each.parameter.data_ptr() == view.data_ptr() and each.parameter.numel()
        }
        self._undo_in(private)
        for number, value in private.items():
            self._owners.named[number].parameter.data = value
        self.flats, self._copies, self._views = [], [], []

    def _undo_in(self, private: dict[int, Tensor]) -> None:
        """Replace the ranges that an unfinished update has changed by those from before it."""
        if self.undo is None:
            return
        for owner, ranges in enumerate(self._owners.owned):
            if not self.undo.is_undone(owner):
                continue
            for number, start, end in ranges:
                if number in private:
                    kept = self._copies[number][start:end]
                    flat_in_memory(private[number])[start:end].copy_(kept)

    def bump_versions(self) -> None:
        """Increase the version counters of the weights, which other processes have changed too.

        So autograd refuses to use a graph from before the change.
        """
        for each in self._owners.named:
            parameter = each.parameter
            torch._C._autograd._unsafe_set_version_counter((parameter,), (parameter._version + 1,))


def _check(named: Sequence[Named]) -> None:
    for name, parameter in named:
        if parameter.device.type != "cpu":
            raise UserError(
                f"share_weights: parameter {name!r} is on {parameter.device}; only memory of the"
                " host can be shared"
            )
        if not parameter.dtype.is_floating_point:
            raise UserError(
                f"share_weights: parameter {name!r} is {parameter.dtype}; only floating-point"
                " weights can be shared"
            )


def _places(named: Sequence[Named]) -> tuple[list[int], int]:
    """Return where each parameter starts in the memory, in bytes, and the bytes of all."""
    starts, total = [], 0
    for each in named:
        starts.append(total)
        total += -(-max(nbytes_of(each.parameter), 1) // _ALIGNED) * _ALIGNED
    return starts, total


def _flats(named: Sequence[Named], memory: memoryview, starts: Sequence[int]) -> list[Tensor]:
    """Return a flat tensor in the memory for each parameter."""
    return [
        (
            torch.frombuffer(
                memory,
                dtype=each.parameter.dtype,
                count=each.parameter.numel(),
                offset=start,
            )
            if each.parameter.numel()
            else each.parameter.detach().view(-1)
        )
        for each, start in zip(named, starts, strict=True)
    ]


def _like(flat: Tensor, parameter: Parameter) -> Tensor:
    return flat.as_strided(parameter.shape, dense_strides(parameter))
