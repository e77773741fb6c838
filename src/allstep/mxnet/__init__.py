"""Horovod's MXNet API: `import allstep.mxnet as hvd`.

    hvd.init()
    hvd.broadcast_parameters(model.collect_params(), root_rank=0)
    trainer = hvd.DistributedTrainer(model.collect_params(), "sgd", {"learning_rate": 0.1})

Names, arguments and results are those of Horovod 0.28.1; `docs/horovod-mxnet.md` lists the
differences and their reasons. MXNet is retired: its last release, 1.9.1, runs on a current numpy
once `numpy_names` has added the names that numpy removed. Importing this package prepares that, so
`import mxnet` may follow it; a script that imports mxnet first needs `allstep run --as-horovod`.

The operations wait for their result. With a trailing underscore the result is written into the
given array; without it, the input is not changed and the result is a new array. A `grouped_`
operation takes several arrays, which run together. They share these arguments:

- `op`: the reduction: Average (default), Sum, Adasum, Min, Max or Product.
- `average`: Horovod's older form of `op`: True is Average, False is Sum. Deprecated.
- `name`: the name by which the ranks match the operation. Default: its number; all ranks must then
  have requested equally many operations before.
- `priority`: Horovod's order of waiting operations. It has no effect, since none waits.
- `prescale_factor`, `postscale_factor`: factors of the array before and of the result after the
  reduction (default: 1.0).
- `process_set`: the ranks that participate (default: all ranks).
- `root_rank`: the rank whose data is sent, always a rank of the world.

Every error is an MXNetError. For a wrong argument it is also a ValueError, and no request is sent;
for a failure between ranks it is also a HorovodInternalError.
"""

# Before torch: both use one OpenMP library, which reads its number of threads when it is loaded.
from allstep.mxnet import framework as _framework  # noqa: F401
from allstep.mxnet.compression import Compression
from allstep.mxnet.functions import allgather_object, broadcast_object, broadcast_parameters
from allstep.mxnet.mpi_ops import (
    Adasum,
    Average,
    Max,
    Min,
    ProcessSet,
    Product,
    Sum,
    add_process_set,
    allgather,
    allreduce,
    allreduce_,
    alltoall,
    broadcast,
    broadcast_,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    global_process_set,
    gloo_built,
    gloo_enabled,
    grouped_allgather,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_reducescatter,
    init,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    reducescatter,
    remove_process_set,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
    sycl_built,
)
from allstep.mxnet.optimizer import DistributedOptimizer
from allstep.mxnet.trainer import DistributedTrainer

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "DistributedTrainer",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "alltoall",
    "broadcast",
    "broadcast_",
    "broadcast_object",
    "broadcast_parameters",
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
    "grouped_allreduce_",
    "grouped_reducescatter",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
    "sycl_built",
]
