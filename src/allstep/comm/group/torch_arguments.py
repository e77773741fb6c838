"""Torch's argument shapes: how torch passes tensors and options to the collectives of a group.

torch calls one collective in several ways, depending on its version and on the caller:

    broadcast([tensor], opts)                       torch.distributed, DDP
    broadcast(tensor, root, timeout)                functional collectives
    broadcast(tensor, root=0, timeout=...)          callers in Python, by keyword
    gather([[tensor, ...]], [tensor], opts)         one list per device; there is one device
    gather([tensor, ...], tensor, root, timeout)    without the outer lists

Each function below accepts all shapes of its collective and returns the first one: lists, and
torch's option object. Arguments that are not given keep torch's defaults. Where the time of a call
matters (allreduce, broadcast, all_to_all, barrier), the group itself tests for the first shape and
calls these functions only for the others.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)

# Options of a call that gives none.
ALL_REDUCE = AllreduceOptions()
COALESCED = AllreduceCoalescedOptions()
BROADCAST = BroadcastOptions()
REDUCE = ReduceOptions()
ALL_GATHER = AllgatherOptions()
GATHER = GatherOptions()
SCATTER = ScatterOptions()
REDUCE_SCATTER = ReduceScatterOptions()
ALL_TO_ALL = AllToAllOptions()
BARRIER = BarrierOptions()


def allreduce(
    tensors: Any,
    opts: Any,
    timeout: Any,
    **named: Any,
) -> tuple[list[Tensor], AllreduceOptions]:
    """Return tensors and options. opts: the options, or the reduction."""
    return _list(tensors), _options(AllreduceOptions, timeout, reduceOp=named.get("op", opts))


def broadcast(
    tensors: Any,
    opts: Any,
    timeout: Any,
    **named: Any,
) -> tuple[list[Tensor], BroadcastOptions]:
    """Return tensors and options. opts: the options, or the root."""
    return _list(tensors), _options(BroadcastOptions, timeout, rootRank=named.get("root", opts))


def reduce(
    tensors: Any,
    opts: Any = REDUCE,
    op: Any = torch.distributed.ReduceOp.SUM,
    timeout: timedelta | None = None,
    **named: Any,
) -> tuple[list[Tensor], ReduceOptions]:
    """Return tensors and options. opts: the options, or the root."""
    if type(tensors) is not list or type(opts) is not ReduceOptions or named:
        root = named.get("root", opts)
        tensors, opts = _list(tensors), _options(ReduceOptions, timeout, rootRank=root, reduceOp=op)
    return tensors, opts


def allgather(
    outputs: Sequence[Any], inputs: Any, opts: Any = ALL_GATHER, **named: Any
) -> tuple[Sequence[Any], Any, AllgatherOptions]:
    """Return outputs, inputs and options. opts: the options, or the timeout."""
    if isinstance(inputs, Tensor):
        outputs, inputs = [outputs], [inputs]
    if type(opts) is not AllgatherOptions or named:
        opts = _options(AllgatherOptions, named.get("timeout", opts))
    return outputs, inputs, opts


def gather(
    outputs: Any, inputs: Any, opts: Any = GATHER, timeout: timedelta | None = None, **named: Any
) -> tuple[Any, Any, GatherOptions]:
    """Return outputs, inputs and options. opts: the options, or the root."""
    if isinstance(inputs, Tensor):
        outputs, inputs = [outputs], [inputs]
    if type(opts) is not GatherOptions or named:
        opts = _options(GatherOptions, timeout, rootRank=named.get("root", opts))
    return outputs, inputs, opts


def scatter(
    outputs: Any, inputs: Any, opts: Any = SCATTER, timeout: timedelta | None = None, **named: Any
) -> tuple[Any, Any, ScatterOptions]:
    """Return outputs, inputs and options. opts: the options, or the root."""
    if isinstance(outputs, Tensor):
        outputs, inputs = [outputs], [inputs]
    if type(opts) is not ScatterOptions or named:
        opts = _options(ScatterOptions, timeout, rootRank=named.get("root", opts))
    return outputs, inputs, opts


def reduce_scatter(
    outputs: Any,
    inputs: Any,
    opts: Any = REDUCE_SCATTER,
    timeout: timedelta | None = None,
    **named: Any,
) -> tuple[Any, Any, ReduceScatterOptions]:
    """Return outputs, inputs and options. opts: the options, or the reduction."""
    if isinstance(outputs, Tensor):
        outputs, inputs = [outputs], [inputs]
    if type(opts) is not ReduceScatterOptions or named:
        opts = _options(ReduceScatterOptions, timeout, reduceOp=named.get("op", opts))
    return outputs, inputs, opts


def all_to_all(opts: Any, **named: Any) -> AllToAllOptions:
    """Return the options. opts: the options, or the timeout."""
    options: AllToAllOptions = _options(AllToAllOptions, named.get("timeout", opts))
    return options


def barrier(opts: Any, **named: Any) -> BarrierOptions:
    """Return the options. opts: the options, or the timeout."""
    options: BarrierOptions = _options(BarrierOptions, named.get("timeout", opts))
    return options


def _list(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _options(kind: Any, timeout: Any, **fields: Any) -> Any:
    """Make torch's option object for an argument shape that has none.

    A field that is already such an object is returned as it is.
    """
    for value in (timeout, *fields.values()):
        if type(value) is kind:
            return value
    opts = kind()
    if isinstance(timeout, timedelta):
        opts.timeout = timeout
    for name, value in fields.items():
        setattr(opts, name, value)
    return opts
