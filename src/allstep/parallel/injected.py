"""Injected faults of weights and gradients: `flip` and `nan`."""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from allstep.faults.injector import Injector

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def begin_step(injector: Injector, parameters: Sequence[Tensor]) -> None:
    """Start a step of a script whose gradients have been computed; a no-op within a step."""
    if injector.in_step():
        if injector.takes("flip"):
            flip_bit(parameters)
        if injector.takes("nan"):
            for parameter in parameters:
                if parameter.grad is not None:
                    # Not in place: the gradient may be sparse.
                    parameter.grad = parameter.grad * math.nan
        injector.reduce_begins()


@torch.no_grad()
def flip_bit(parameters: Iterable[Tensor]) -> None:
    """Invert one bit of the largest parameter: the highest of the fraction of its middle element.

    So the value changes by up to a third and stays finite.
    """
    largest = max(parameters, key=Tensor.numel)
    number = torch.finfo(largest.dtype)
    bits = 1 << (round(-math.log2(number.eps)) - 1)
    # Of a copy, since a parameter need not be contiguous.
    place = largest.numel() // 2
    index = tuple(int(each) for each in torch.unravel_index(torch.tensor(place), largest.shape))
    element = largest[index].clone().view(_INTEGERS[number.bits // 8])
    largest[index] = (element ^ bits).view(largest.dtype)
