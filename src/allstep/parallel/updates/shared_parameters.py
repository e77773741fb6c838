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
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore
from torch.nn import Parameter

from allstep.comm.memory.segment import CannotShare, share
from allstep.errors import CommError, UserError
from allstep.limits import read_limits
from allstep.parallel.exchange.buckets import nbytes_of
from allstep.parallel.exchange.owners import Owners
from allstep.parallel.exchange.packed_gradients import dense_strides
from allstep.parallel.exchange.parameter_order import Named

# Bytes.
_ALIGNED = 64


class SharedParameters:
    """The parameters of an exchange in memory that the ranks of the host share.

    All ranks of the host make it together. The values are those of the host's first rank.
    """

    def __init__(self, owners: Owners) -> None:
        self._owners = owners
        _check(owners.named)
        self.flats = self._shared_flats()
        self._views = [
            _like(flat, each.parameter) for flat, each in zip(self.flats, owners.named, strict=True)
        ]
        if owners.local.arena.rank == 0:
            for view, each in zip(self._views, owners.named, strict=True):
                view.copy_(each.parameter.detach())
        owners.meet()
        for view, each in zip(self._views, owners.named, strict=True):
            each.parameter.data = view

    def _shared_flats(self) -> list[Tensor]:
        """Return a flat tensor in shared memory for each parameter."""
        owners, starts, total = self._owners, [], 0
        for each in owners.named:
            starts.append(total)
            total += -(-max(nbytes_of(each.parameter), 1) // _ALIGNED) * _ALIGNED
        local = owners.local
        store = PrefixStore(
            f"weights/{owners.key}/{local.layout.host}", owners.group.get_group_store()
        )
        check = owners.group.guard.check_for("share_weights")
        seconds = read_limits().start
        try:
            segment = share(store, local.arena.rank, local.arena.size, total, seconds, check)
        except CannotShare as error:
            raise CommError(
                f"share_weights: {total} bytes of weights: {error}", rank=owners.group.rank()
            ) from error
        return [
            (
                torch.frombuffer(
                    segment.view,
                    dtype=each.parameter.dtype,
                    count=each.parameter.numel(),
                    offset=start,
                )
                if each.parameter.numel()
                else each.parameter.detach().view(-1)
            )
            for each, start in zip(owners.named, starts, strict=True)
        ]

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

    def make_private(self) -> None:
        """End the sharing: copy the parameters to memory of this rank alone."""
        for view, each in zip(self._views, self._owners.named, strict=True):
            if each.parameter.data_ptr() == view.data_ptr() and each.parameter.numel():
                each.parameter.data = view.clone()
        self.flats, self._views = [], []

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


def _like(flat: Tensor, parameter: Parameter) -> Tensor:
    return flat.as_strided(parameter.shape, dense_strides(parameter))
