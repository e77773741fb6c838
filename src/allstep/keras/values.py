"""Collectives on values outside of a model: numbers, lists, arrays and tensors.

They take whatever numpy can convert, and return a tensor of the backend for a tensor and a numpy
array for anything else. They run at once, on the host: not inside a traced function.
"""

from typing import Any

from allstep.hvd.handles import perform
from allstep.hvd.process_sets import global_process_set
from allstep.hvd.requests import (
    Average,
    Sum,
    broadcasting,
    gathering,
    named,
    reduction,
    scattering,
)
from allstep.keras.framework_arrays import from_torch, like, to_array, to_torch
from allstep.keras_shared.optimizer_arguments import compressor
from allstep.torch.compression import Compression


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = True,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: int | None = None,
    compression: Any = Compression.none,
) -> Any:
    """Return the reduction of `value` over all ranks.

    - `name`: the name by which the ranks match the operation (default: its number).
    - `average`: Horovod's older form of `op`: False is Sum. `op` supersedes it.
    - `prescale_factor`, `postscale_factor`: factors before and after the reduction (default: 1.0).
    - `op`: Average (default), Sum, Adasum, Min, Max or Product.
    - `compression`: the compressor for the data while it is sent (default: none).
    """
    chosen = _operation(op, average)
    functions = compressor(compression)
    tensor, context = to_torch(to_array(value)), None
    if functions["compress"]:
        tensor, context = functions["compress"](tensor)
    full_name = named("allreduce", name)
    request = reduction(
        tensor, None, full_name, chosen, prescale_factor, postscale_factor, global_process_set
    )
    result = perform(request)
    if functions["decompress"]:
        result = functions["decompress"](result, context)
    return like(value, from_torch(result))


def allgather(value: Any, name: str | None = None) -> Any:
    """Return the values of all ranks, concatenated along the first axis by rank.

    The first axis may differ in length between ranks. `name`: as for `allreduce`.
    """
    tensor = to_torch(to_array(value))
    request = gathering(tensor, named("allgather", name), global_process_set)
    return like(value, from_torch(perform(request)))


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """Return the value of rank `root_rank`; all ranks give a value of the same shape and type.

    `name`: as for `allreduce`.
    """
    tensor = to_torch(to_array(value))
    request = broadcasting(tensor, None, root_rank, name, global_process_set)
    return like(value, from_torch(perform(request)))


def reducescatter(value: Any, name: str | None = None, op: int = Average) -> Any:
    """Return this rank's slice of the reduction over all ranks, along the first axis.

    `op`: Average (default) or Sum. `name`: as for `allreduce`.
    """
    tensor = to_torch(to_array(value))
    full_name = named("reducescatter", name)
    request = scattering(tensor, full_name, op, global_process_set, 1.0, 1.0)
    return like(value, from_torch(perform(request)))


def broadcast_global_variables(root_rank: int) -> None:
    """Raise RuntimeError: Keras 3 keeps no list of all variables, as Horovod in eager mode."""
    raise RuntimeError(
        f"broadcast_global_variables({root_rank}): Keras 3 has no global variables; write"
        f" callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback({root_rank})] in model.fit, or"
        f" hvd.broadcast_variables(model.variables, {root_rank})"
    )


def _operation(op: int | None, average: bool | None) -> int:
    """Return the reduction of both arguments; raise ValueError if they contradict each other."""
    if op is None:
        return Sum if average is False else Average
    if average is False and op != Sum:
        raise ValueError(f"op={op} and average=False: op supersedes average, give only op")
    return op
