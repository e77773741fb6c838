"""Keras on torch: the gradients are `p.grad` of the variables, and are reduced in place.

A gradient that is not the `p.grad` of its variable (a custom loop with `torch.autograd.grad`) may
share its memory with another tensor, so it is copied first.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from allstep.keras_shared.gradient_reduction import Reduction

IN_PLACE = True


def reduce(
    reduction: Reduction, grads: Sequence[Tensor | None], variables: Sequence[Any]
) -> tuple[bool, list[Any]]:
    """Reduce gradients, each with the variable that it belongs to."""
    return _reduce_now(reduction, grads, variables)


def leave_compiled_code() -> None:
    """Reduce outside of functions that torch.compile compiles.

    Only for models that are compiled, since it imports torch's compiler, which takes seconds.
    """
    global _reduce_now
    disable: Any = torch.compiler.disable
    _reduce_now = disable(_reduce)


def _reduce(
    reduction: Reduction, grads: Sequence[Tensor | None], variables: Sequence[Any]
) -> tuple[bool, list[Any]]:
    with torch.no_grad():
        arrays = [
            _writable(grad, variable) for grad, variable in zip(grads, variables, strict=True)
        ]
        return reduction.step(arrays)


def wait() -> None:
    """Do nothing: a step has ended when its function returns."""


def forget_error() -> None:
    """Do nothing: an error is raised once."""


def conditional(flag: bool, update: Callable[[], None], skip: Callable[[], None]) -> None:
    """Call `update` if the flag is set, otherwise `skip`."""
    (update if flag else skip)()


def _writable(grad: Tensor | None, variable: Any) -> Tensor | None:
    """Return the gradient in memory that only it uses, in the order of its elements."""
    if grad is None:
        return None
    if grad.layout != torch.strided:
        dense: Tensor = grad.to_dense()
        return dense.contiguous()
    owns_memory: bool = grad is variable.value.grad
    if owns_memory:
        return grad.contiguous()
    return grad.detach().clone(memory_format=torch.contiguous_format)


_reduce_now = _reduce
