"""Every name and signature of `horovod.keras` and `horovod.tensorflow.keras`, for both Kerases.

Where the two differ, ours has the arguments of both: those of `horovod.tensorflow.keras`, and those
that only `horovod.keras` has at the end.
"""

import importlib
import inspect
from collections.abc import Iterator
from typing import Any

NAMES = """
init shutdown is_initialized start_timeline stop_timeline size local_size cross_size rank local_rank
cross_rank mpi_threads_supported mpi_enabled mpi_built gloo_enabled gloo_built nccl_built ddl_built
ccl_built cuda_built rocm_built sycl_built is_homogeneous
Average Sum Adasum Compression ProcessSet global_process_set add_process_set remove_process_set
callbacks elastic DistributedOptimizer PartialDistributedOptimizer broadcast_global_variables
allreduce allgather broadcast reducescatter load_model
"""
OURS = """
BroadcastGlobalVariablesCallback HorovodInternalError Batches batches evaluate broadcast_variables
"""
"""Names that Horovod does not have."""

_OPTIMIZER = (
    "optimizer, name=None, device_dense='', device_sparse='', compression=NONE,"
    " sparse_as_dense=False, gradient_predivide_factor=1.0, op=0, backward_passes_per_step=1,"
    " average_aggregated_gradients=False"
)
SIGNATURES = {
    "DistributedOptimizer": f"{_OPTIMIZER}, num_groups=0, groups=None, process_set=PS,"
    " scale_local_gradients=True",
    "PartialDistributedOptimizer": f"{_OPTIMIZER}, groups=None, process_set=PS, local_layers=None,"
    " scale_local_gradients=True",
    "allreduce": "value, name=None, average=AVERAGE, prescale_factor=1.0, postscale_factor=1.0,"
    " op=None, compression=NONE",
    "allgather": "value, name=None",
    "broadcast": "value, root_rank, name=None",
    "reducescatter": "value, name=None, op=0",
    "broadcast_global_variables": "root_rank",
    "load_model": "filepath, custom_optimizers=None, custom_objects=None, compression=NONE,"
    " legacy_opts=False",
    "callbacks.BroadcastGlobalVariablesCallback": "root_rank, device='', local_variables=None",
    "callbacks.MetricAverageCallback": "device=''",
    "callbacks.LearningRateScheduleCallback": "initial_lr, multiplier, start_epoch=0,"
    " end_epoch=None, staircase=True, momentum_correction=True, steps_per_epoch=None",
    "callbacks.LearningRateWarmupCallback": "initial_lr, warmup_epochs=5, momentum_correction=True,"
    " steps_per_epoch=None, verbose=0",
    "callbacks.BestModelCheckpoint": "monitor='val_loss', verbose=0, save_weights_only=False,"
    " mode='auto', save_freq='epoch'",
    "elastic.KerasState": "model, optimizer=None, **kwargs",
    "elastic.run": "func",
    "elastic.CommitStateCallback": "state, batches_per_commit=1",
    "elastic.UpdateBatchStateCallback": "state",
    "elastic.UpdateEpochStateCallback": "state",
}


def check_surface(hvd: Any, average: str) -> None:
    """Compare a front-end with the lists. `average`: the default of `allreduce`."""
    assert sorted(hvd.__all__) == sorted(f"{NAMES} {OURS}".split())
    for name in NAMES.split():
        assert getattr(hvd, name) is not None, name
    for name, text in SIGNATURES.items():
        found = ", ".join(_parameters(_attribute(hvd, name)))
        assert found == text.replace("AVERAGE", average), name
    from allstep.hvd import process_sets

    assert hvd.ProcessSet is process_sets.ProcessSet
    assert (hvd.Average, hvd.Sum, hvd.Adasum) == (0, 1, 2)


def _attribute(hvd: Any, name: str) -> Any:
    module, _, last = name.rpartition(".")
    return getattr(importlib.import_module(f"{hvd.__name__}.{module}") if module else hvd, last)


def _parameters(function: Any) -> Iterator[str]:
    """Yield the parameters of a function or class as they are written in the list."""
    for each in inspect.signature(function).parameters.values():
        if each.default is inspect.Parameter.empty:
            yield str(each.replace(annotation=inspect.Parameter.empty))
        else:
            yield f"{each.name}={_default(each.default)}"


def _default(value: Any) -> str:
    if getattr(value, "__name__", "") == "NoneCompressor":
        return "NONE"
    return "PS" if type(value).__name__ == "ProcessSet" else repr(value)
