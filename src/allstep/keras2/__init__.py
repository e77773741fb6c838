"""Horovod's API for Keras 2, the `tf_keras` package: `import allstep.keras2 as hvd`.

With TF_USE_LEGACY_KERAS=1 it is `horovod.tensorflow.keras`, and `tf.keras` is Keras 2:

    hvd.init()
    optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.01 * hvd.size()))
    model.compile(optimizer=optimizer, ..., experimental_run_tf_function=False)
    model.fit(x, y, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])

Names, arguments and results are Horovod's; `docs/horovod-keras.md` lists the differences. Keras 3
is not imported.
"""

try:
    import tf_keras as _tf_keras  # noqa: F401
except ModuleNotFoundError as error:
    raise ImportError(
        "allstep.keras2 needs Keras 2: pip install tensorflow tf-keras", name=error.name
    ) from error

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
from allstep.keras2 import callbacks, elastic
from allstep.keras2.adopted_models import install as _install
from allstep.keras2.callbacks import BroadcastGlobalVariablesCallback
from allstep.keras2.loaded_models import load_model
from allstep.keras2.plain_values import (
    allgather,
    allreduce,
    broadcast,
    broadcast_global_variables,
    reducescatter,
)
from allstep.keras2.sequence_batches import Batches, batches
from allstep.keras_shared.exact_evaluation import evaluate
from allstep.keras_shared.wrapped_optimizers import (
    DistributedOptimizer,
    PartialDistributedOptimizer,
)
from allstep.tensorflow.functions import broadcast_variables
from allstep.tensorflow.sessions import provide_threads as _provide_threads
from allstep.torch.compression import Compression

# Now: `model.compile(hvd.DistributedOptimizer(...))` finds `compile` before it makes the optimizer.
_install()
# Before the script makes its Session for Keras: reductions of several optimizers wait in threads.
_provide_threads()

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
