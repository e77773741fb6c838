"""Collectives on values outside of a Keras 2 model: numbers, lists, arrays and tensors.

They take whatever `tf.constant` takes, and return a tensor for a tensor or variable and a numpy
array for anything else. In the graph of a Session they run in Keras's Session.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from allstep.hvd.requests import Average, Sum
from allstep.keras_shared.optimizer_arguments import compressor_name
from allstep.tensorflow import functions, mpi_ops, sparse_and_dense
from allstep.tensorflow.compression import Compression


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
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
    chosen = op if op is not None else Sum if average is False else Average
    # That of another front-end has the same name here, for tensors of TensorFlow.
    known = compressor_name(compression)
    used = compression if known is None else getattr(Compression, known)
    return _evaluated(
        value,
        lambda tensor: sparse_and_dense.allreduce(
            tensor,
            name=name,
            op=chosen,
            compression=used,
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
        ),
    )


def allgather(value: Any, name: str | None = None) -> Any:
    """Return the values of all ranks, concatenated along the first axis by rank.

    `name`: as for `allreduce`.
    """
    return _evaluated(value, lambda tensor: mpi_ops.allgather(tensor, name=name))


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """Return the value of rank `root_rank`; all ranks give a value of the same shape and type.

    `name`: as for `allreduce`.
    """
    return _evaluated(value, lambda tensor: mpi_ops.broadcast(tensor, root_rank, name=name))


def reducescatter(value: Any, name: str | None = None, op: int = Average) -> Any:
    """Return this rank's slice of the reduction over all ranks, along the first axis.

    `op`: Average (default) or Sum. `name`: as for `allreduce`.
    """
    return _evaluated(
        value, lambda tensor: sparse_and_dense.reducescatter(tensor, name=name, op=op)
    )


def broadcast_global_variables(root_rank: int) -> None:
    """Give the root's values to all global variables of the graph, in Keras's Session.

    Raise RuntimeError in eager mode, which has no global variables, as Horovod.
    """
    operation = functions.broadcast_global_variables(root_rank)
    tf.compat.v1.keras.backend.get_session().run(operation)


def _evaluated(value: Any, collective: Callable[[Any], Any]) -> Any:
    """Return the result of a collective in the form of `value`."""
    result = collective(tf.convert_to_tensor(value))
    if not tf.executing_eagerly():
        return tf.compat.v1.keras.backend.get_session().run(result)
    return result if tf.is_tensor(value) or isinstance(value, tf.Variable) else result.numpy()
