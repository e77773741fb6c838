"""A collective call in words: for error messages, traces, and to see whether all ranks make the
same call.

`all_reduce(float32 [3, 4], SUM)`: name, dtype, shape where the ranks' tensors must have the same
one, reduction.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_SAME_SHAPE = ("all_reduce", "reduce", "broadcast", "all_gather_single", "reduce_scatter_single")


def describe(
    name: str, dtype: torch.dtype, shape: Sequence[int] | None, kind: Any = None, more: str = ""
) -> str:
    """all_reduce(float32 [3, 4], SUM). shape: None when the ranks' tensors may differ."""
    where = "" if shape is None else f" {list(shape)}"
    reduction = f", {kind.name}" if kind is not None else ""
    return f"{name}({str(dtype).removeprefix('torch.')}{where}{reduction}{more})"


def describe_call(name: str, args: Sequence[Any]) -> str:
    """The same for a call as the group passes it on: tensors or lists of them, perhaps splits,
    options last."""
    tensor, opts = first_tensor(args), args[-1]
    if tensor is None:
        return name
    op, root = getattr(opts, "reduceOp", None), getattr(opts, "rootRank", None)
    more = (
        "" if root is None else f", {'from' if name in ('broadcast', 'scatter') else 'to'} {root}"
    )
    return describe(
        name, tensor.dtype, tensor.shape if name in _SAME_SHAPE else None, kind_of(op), more
    )


def first_tensor(args: Sequence[Any]) -> Tensor | None:
    """The first one among arguments that are tensors, lists of them, or something else."""
    each_alone = (
        each for arg in args for each in (arg if isinstance(arg, list | tuple) else (arg,))
    )
    return next((each for each in each_alone if isinstance(each, Tensor)), None)


def kind_of(op: Any) -> Any:
    """The reduction itself, out of an option's object around it; None for none."""
    return None if op is None else op.op if hasattr(op, "op") else op
