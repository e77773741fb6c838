"""Horovod's API for TensorFlow: `import allstep.tensorflow as hvd`.

    hvd.init()
    with tf.GradientTape() as tape:
        loss = ...
    tape = hvd.DistributedGradientTape(tape)
    grads = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(grads, model.trainable_variables))
    # after the first step:
    hvd.broadcast_variables(model.variables, root_rank=0)

Names, arguments and results are Horovod 0.28.1's; `docs/horovod-tensorflow.md` lists the
differences and their reasons. All operations work in eager mode, in `tf.function` and in graphs
with a `tf.compat.v1.Session`, and have gradients.

The operations share these arguments:

- `op`: the reduction: Average (default), Sum, Adasum, Min, Max or Product.
- `average`: Horovod's older form of `op`: True is Average, False is Sum. Deprecated.
- `name`: the name by which the ranks match the operation (default: in a graph the name of the
  node; in eager mode by the order of the calls). `ignore_name_scope`: whether only the last part of
  the node's name counts.
- `compression`: the compressor for the data while it is sent (default: Compression.none).
- `prescale_factor`, `postscale_factor`: factors of the tensor before and of the result after the
  reduction (default: 1.0).
- `process_set`: the ranks that participate (default: all ranks).
- `root_rank`: the rank whose data is sent, always a rank of the world.
- `device_dense`, `device_sparse`: Horovod's; not used, since collectives work in the host's memory.

Failures are TensorFlow's errors: `allstep.tensorflow.tf_errors` has the table.
"""

from collections.abc import Sequence
from typing import Any

from allstep.hvd.frameworks import missing as _missing

try:
    import tensorflow as _tensorflow  # noqa: F401
except ModuleNotFoundError as error:
    raise _missing(__name__, error) from error

from allstep.hvd.basics import (
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
    sycl_built,
)
from allstep.hvd.basics import init as _init
from allstep.hvd.exceptions import HorovodInternalError
from allstep.hvd.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)
from allstep.hvd.requests import (
    Adasum,
    Average,
    Max,
    Min,
    Product,
    Sum,
)
from allstep.tensorflow import elastic
from allstep.tensorflow.compression import Compression
from allstep.tensorflow.functions import (
    BroadcastGlobalVariablesHook,
    allgather_object,
    broadcast_,
    broadcast_global_variables,
    broadcast_object,
    broadcast_object_fn,
    broadcast_variables,
)
from allstep.tensorflow.gradient_aggregation import LocalGradientAggregationHelper
from allstep.tensorflow.mpi_ops import (
    allgather,
    alltoall,
    broadcast,
    grouped_allgather,
    join,
    local_rank_op,
    local_size_op,
    process_set_included_op,
    rank_op,
    size_op,
)
from allstep.tensorflow.optimizer import DistributedOptimizer
from allstep.tensorflow.sessions import provide_threads as _provide_threads
from allstep.tensorflow.sparse_and_dense import (
    allreduce,
    grouped_allreduce,
    grouped_reducescatter,
    reducescatter,
)
from allstep.tensorflow.sync_batch_norm import sync_batch_normalization as _make_batch_norm
from allstep.tensorflow.tape import DistributedGradientTape, PartialDistributedGradientTape


def init(comm: Any = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Connect to the other ranks and start the engine; a second call changes nothing.

    The arguments are those of `allstep.torch.init`. Sessions that are made from now on have threads
    for their collectives.
    """
    _init(comm, process_sets)
    _provide_threads()


def __getattr__(name: str) -> Any:
    """Make SyncBatchNormalization when it is first used: it needs Keras."""
    if name == "SyncBatchNormalization":
        return _make_batch_norm()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "DistributedOptimizer",
    "LocalGradientAggregationHelper",
    "SyncBatchNormalization",
    "elastic",
    "Adasum",
    "Average",
    "BroadcastGlobalVariablesHook",
    "Compression",
    "DistributedGradientTape",
    "Max",
    "Min",
    "PartialDistributedGradientTape",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "broadcast",
    "broadcast_",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_rank_op",
    "local_size",
    "local_size_op",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "process_set_included_op",
    "rank",
    "rank_op",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "size_op",
    "start_timeline",
    "stop_timeline",
    "sycl_built",
    "HorovodInternalError",
]
