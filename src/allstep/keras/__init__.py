"""Horovod's API for Keras: `import allstep.keras as hvd`.

    hvd.init()
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.01 * hvd.size())), ...)
    model.fit(x, y, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])

It works with Keras 3 on TensorFlow, torch and JAX; `KERAS_BACKEND` selects the backend, as for
plain Keras. Names, arguments and results are Horovod's; `docs/horovod-keras.md` lists the
differences.
"""

from allstep.hvd.frameworks import missing as _missing
from allstep.hvd.frameworks import no_backend as _no_backend

try:
    import keras as _keras  # noqa: F401
except ModuleNotFoundError as error:
    # Keras itself, or its backend: TensorFlow unless KERAS_BACKEND names another one.
    raise _missing(__name__, error) from error
except ValueError as error:
    raise _no_backend(error) from None

from allstep.hvd.basics import (
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    init,
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
from allstep.hvd.exceptions import HorovodInternalError
from allstep.hvd.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)
from allstep.hvd.requests import Adasum, Average, Sum
from allstep.keras import callbacks, elastic
from allstep.keras.callbacks import BroadcastGlobalVariablesCallback
from allstep.keras.compiled_models import install as _install
from allstep.keras.global_batches import Batches, batches
from allstep.keras.saved_models import load_model
from allstep.keras.values import (
    allgather,
    allreduce,
    broadcast,
    broadcast_global_variables,
    reducescatter,
)
from allstep.keras.variables import broadcast_variables
from allstep.keras_shared.exact_evaluation import evaluate
from allstep.keras_shared.wrapped_optimizers import (
    DistributedOptimizer,
    PartialDistributedOptimizer,
)
from allstep.torch.compression import Compression

# Now: `model.compile(hvd.DistributedOptimizer(...))` finds `compile` before it makes the optimizer.
_install()

__all__ = [
    "Adasum",
    "Average",
    "Batches",
    "BroadcastGlobalVariablesCallback",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "PartialDistributedOptimizer",
    "ProcessSet",
    "Sum",
    "add_process_set",
    "allgather",
    "allreduce",
    "batches",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_variables",
    "callbacks",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "evaluate",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "load_model",
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
