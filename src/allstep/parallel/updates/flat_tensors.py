"""Tensors of a model in a few large buffers, so that one reduction of each combines all of them.

```
tensors     conv1.weight   conv1.bias   fc1.weight   ...       anywhere in memory
              | read          ^ write
flats       | conv1.weight | conv1.bias | fc1.weight | ... |   one per dtype and device, in memory
                                                               that the ranks of a host share
```

Tensors in half precision are combined in float32. All ranks use the same order, agreed once, so the
sums of the ranks are those of single tensors: each element is added in rank order.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import BroadcastOptions

from allstep.comm.group.process_group import AllstepGroup
from allstep.comm.group.shared_empty import shared_empty
from allstep.parallel.exchange.packed_gradients import dense_strides
from allstep.parallel.exchange.parameter_order import Named, agreed_order

_EXACT = (torch.float32, torch.float64)


class FlatTensors:
    """Flat buffers for the tensors `named`. All ranks of `group` make it together.

    `group`: None in a world of one rank. `key`: distinguishes these tensors from others.
    """

    def __init__(self, group: AllstepGroup | None, key: str, named: Sequence[Named]) -> None:
        self._group = group
        self.named = list(named) if group is None else agreed_order(group, key, named)
        self.signature = signature_of(named)
        self.flats: list[Tensor] = []
        # By buffer: numbers of its tensors, and a view for each of them.
        self._numbers: list[list[int]] = []
        self._views: list[list[Tensor]] = []
        for numbers in self._by_kind().values():
            self._add(numbers)

    def _by_kind(self) -> dict[Any, list[int]]:
        found: dict[Any, list[int]] = {}
        for number, each in enumerate(self.named):
            tensor = _real(each.parameter)
            found.setdefault((_summed_as(tensor), tensor.device), []).append(number)
        return found

    def _add(self, numbers: list[int]) -> None:
        tensors = [_real(self.named[number].parameter) for number in numbers]
        dtype, device = _summed_as(tensors[0]), tensors[0].device
        count = sum(tensor.numel() for tensor in tensors)
        flat = (
            shared_empty(count, dtype, self._group)
            if device.type == "cpu" and self._group is not None
            else torch.empty(count, dtype=dtype, device=device)
        )
        views, start = [], 0
        for tensor in tensors:
            views.append(flat.as_strided(tensor.shape, dense_strides(tensor), start))
            start += tensor.numel()
        self.flats.append(flat)
        self._numbers.append(numbers)
        self._views.append(views)

    def _tensors(self, numbers: Sequence[int]) -> list[Tensor]:
        return [_real(self.named[number].parameter) for number in numbers]

    @torch.no_grad()
    def read(self) -> None:
        """Copy the tensors into the buffers."""
        for numbers, views in zip(self._numbers, self._views, strict=True):
            torch._foreach_copy_(views, self._tensors(numbers))

    @torch.no_grad()
    def write(self, flats: Sequence[Tensor]) -> None:
        """Copy buffers like ours into the tensors, and round the buffers as the tensors are."""
        for flat, numbers, views in zip(flats, self._numbers, self._views, strict=True):
            tensors = self._tensors(numbers)
            places = [_place_in(flat, view) for view in views]
            torch._foreach_copy_(tensors, places)
            if any(tensor.dtype != flat.dtype for tensor in tensors):
                torch._foreach_copy_(places, tensors)

    def _sum_scaled(self, scale: float) -> None:
        for flat in self.flats:
            if not scale:
                # Not 0 times the content, which may be NaN.
                flat.zero_()
            if self._group is not None:
                self._group.sum_scaled(flat, scale)
            elif scale != 1.0:
                flat.mul_(scale)

    @torch.no_grad()
    def take_first(self) -> list[Tensor]:
        """Give all ranks the first rank's tensors; return copies of the buffers with them."""
        self.read()
        broadcast(self._group, self.flats)
        self.write(self.flats)
        return [flat.clone() for flat in self.flats]

    @torch.no_grad()
    def mean_difference(self, before: Sequence[Tensor], share: float) -> list[Tensor]:
        """Return `before` minus the weighted mean of all ranks' tensors, as the buffers.

        `share`: the weight of this rank; the weights of all ranks add up to 1.
        """
        self.read()
        for flat, old in zip(self.flats, before, strict=True):
            # A mask may hold infinities, whose difference is NaN.
            same = old == flat
            torch.sub(old, flat, out=flat).masked_fill_(same, 0.0)
        self._sum_scaled(share)
        return self.flats

    def split(self, flats: Sequence[Tensor]) -> list[tuple[int, Tensor]]:
        """Return number and view of each tensor in buffers like ours; nothing without buffers."""
        found: list[tuple[int, Tensor]] = []
        if not flats:
            return found
        for flat, numbers, views in zip(flats, self._numbers, self._views, strict=True):
            for number, view in zip(numbers, views, strict=True):
                place = _place_in(flat, view)
                like = self.named[number].parameter
                found.append((number, torch.view_as_complex(place) if like.is_complex() else place))
        return found


def _place_in(flat: Tensor, view: Tensor) -> Tensor:
    """Return the same view of another buffer."""
    return flat.as_strided(view.shape, view.stride(), view.storage_offset())


def signature_of(named: Sequence[Named]) -> list[Any]:
    """Return what must stay the same for the buffers to fit."""
    return [
        (each.name, each.parameter.shape, each.parameter.dtype, each.parameter.device)
        for each in named
    ]


def broadcast(group: AllstepGroup | None, tensors: Sequence[Tensor], root: int = 0) -> None:
    """Replace contiguous tensors by those of the rank `root`."""
    for tensor in tensors if group is not None else ():
        if tensor.numel():
            opts = BroadcastOptions()
            opts.rootRank, opts.rootTensor, opts.asyncOp = root, 0, False
            assert group is not None
            group.broadcast([tensor], opts).wait()


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()


def _summed_as(tensor: Tensor) -> torch.dtype:
    return tensor.dtype if tensor.dtype in _EXACT else torch.float32
