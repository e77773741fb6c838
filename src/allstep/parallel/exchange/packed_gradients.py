"""Small gradients that are reduced together: one flat buffer that the ranks share, with a view of
it for each parameter.

```
flat     | conv1.weight | conv1.bias | norm1.weight | ...
views      one for each, with the parameter's shape and strides
```
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from allstep.comm.group.process_group import AllstepGroup
from allstep.comm.group.shared_empty import shared_empty
from allstep.parallel.exchange.parameter_order import Named


@dataclass
class Pack:
    """The buffer for gradients of one dtype and device. `views`: by the number of the parameter."""

    flat: Tensor
    views: dict[int, Tensor]


def make_pack(
    group: AllstepGroup | None,
    named: Sequence[Named],
    numbers: Sequence[int],
    alignment: int = 1,
) -> Pack:
    """Return a buffer for the parameters with these numbers, which have one dtype and device.

    All ranks of the group call it together, and share the memory; None: memory of its own.
    `alignment`: in bytes, of the start of each view; the gaps between views are zero.
    """
    shapes = [named[number].parameter for number in numbers]
    dtype, device = shapes[0].dtype, shapes[0].device
    step = max(1, alignment // dtype.itemsize)
    total = sum(_rounded_up(parameter.numel(), step) for parameter in shapes)
    real = torch.view_as_real(torch.empty(0, dtype=dtype)).dtype if dtype.is_complex else dtype
    count = total * (2 if dtype.is_complex else 1)
    flat = (
        shared_empty(count, real, group)
        if device.type == "cpu" and group is not None
        else torch.empty(count, dtype=real, device=device)
    )
    if step > 1:
        flat.zero_()
    whole = torch.view_as_complex(flat.view(-1, 2)) if dtype.is_complex else flat
    views, start = {}, 0
    for number, parameter in zip(numbers, shapes, strict=True):
        views[number] = whole.as_strided(parameter.shape, dense_strides(parameter), start)
        start += _rounded_up(parameter.numel(), step)
    return Pack(flat, views)


def _rounded_up(number: int, step: int) -> int:
    """Return the smallest multiple of `step` that is not less than `number`."""
    return -(-number // step) * step


def dense_strides(parameter: Tensor) -> tuple[int, ...]:
    """Return the strides of a new tensor like it: its own if it fills its memory without gaps."""
    return torch.empty_like(parameter, device="meta").stride()


def flat_in_memory(gradient: Tensor) -> Tensor:
    """Return a flat view in memory order.

    All ranks share the layout, so the order is irrelevant to the sum.
    """
    if gradient.is_complex():
        gradient = torch.view_as_real(gradient)
    if gradient.is_contiguous():
        return gradient.view(-1)
    return gradient.as_strided((gradient.numel(),), (1,))
