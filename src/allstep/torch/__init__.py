"""Horovod's PyTorch API: `import allstep.torch as hvd`.

    hvd.init()
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

Names, arguments, results and errors are Horovod 0.28.1's; `docs/horovod-torch.md` lists the
differences and their reasons.

Operations have up to four variants. A call that ends in `_async` or `_async_` returns a handle at
once, and `synchronize(handle)` waits for the result; the others wait. With a trailing underscore
the result is written into the given tensor; without it, the input is not changed and the result is
a new tensor. A `grouped_` operation takes several tensors, which run together under one handle.

The operations share these arguments:

- `op`: the reduction: Average (default), Sum, Adasum, Min, Max or Product.
- `average`: Horovod's older form of `op`: True is Average, False is Sum. Deprecated.
- `name`: the name by which the ranks match the operation, in any order of the calls. Default: the
  number of the handle; all ranks must then have requested equally many operations before.
- `compression`: the compressor for the data while it is sent (default: Compression.none).
- `prescale_factor`, `postscale_factor`: factors of the tensor before and of the result after the
  reduction (default: 1.0).
- `process_set`: the ranks that participate (default: all ranks).
- `root_rank`: the rank whose data is sent, always a rank of the world.

A wrong argument raises ValueError and sends no request. A failure between ranks raises
HorovodInternalError, in asynchronous operations from `synchronize`.
"""

from allstep.torch import elastic
from allstep.torch.compression import Compression
from allstep.torch.functions import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from allstep.torch.mpi_ops import (
    Adasum,
    Average,
    HorovodInternalError,
    Max,
    Min,
    ProcessSet,
    Product,
    Sum,
    add_process_set,
    allgather,
    allgather_async,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    alltoall,
    alltoall_async,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    global_process_set,
    gloo_built,
    gloo_enabled,
    grouped_allgather,
    grouped_allgather_async,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
    init,
    is_initialized,
    join,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    poll,
    rank,
    reducescatter,
    reducescatter_async,
    remove_process_set,
    rocm_built,
    shutdown,
    size,
    sparse_allreduce_async,
    start_timeline,
    stop_timeline,
    sycl_built,
    synchronize,
)
from allstep.torch.optimizer import DistributedOptimizer
from allstep.torch.sync_batch_norm import SyncBatchNorm

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "DistributedOptimizer",
    "SyncBatchNorm",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "sycl_built",
    "synchronize",
]
