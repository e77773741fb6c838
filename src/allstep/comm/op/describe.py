"""Descriptions of collective calls: for error messages, for traces, and to compare calls of ranks.

`all_reduce(float32 [3, 4], SUM)`: name, dtype, shape (only where all ranks must have the same one)
and reduction.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_SAME_SHAPE = ("all_reduce", "reduce", "broadcast", "all_gather_single", "reduce_scatter_single")


def describe(
    name: str, dtype: torch.dtype, shape: Sequence[int] | None, kind: Any = None, more: str = ""
) -> str:
    """Return a description such as `all_reduce(float32 [3, 4], SUM)`.

    `shape` is None when the ranks' shapes may differ; `more` is appended inside the parentheses.
    """
    where = "" if shape is None else f" {list(shape)}"
    reduction = f", {kind.name}" if kind is not None else ""
    return f"{name}({str(dtype).removeprefix('torch.')}{where}{reduction}{more})"


def describe_call(name: str, args: Sequence[Any]) -> str:
    """Return the description of a call with the arguments that the group passes on.

    Arguments are tensors or lists of tensors, possibly splits, and options last.
    """
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
    """Return the first tensor among arguments that are tensors, lists of them, or other values."""
    each_alone = (
        each for arg in args for each in (arg if isinstance(arg, list | tuple) else (arg,))
    )
    return next((each for each in each_alone if isinstance(each, Tensor)), None)


def kind_of(op: Any) -> Any:
    """Return the reduction's kind (`RedOpType`) out of torch's option object; None for none."""
    return None if op is None else op.op if hasattr(op, "op") else op
