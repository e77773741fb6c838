"""The public face: every name of Horovod 0.28.1's `horovod.torch`, with the parameters and defaults
that scripts rely on."""

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest

import allstep.torch as hvd
from allstep.torch import Compression, global_process_set

NAMES = """
elastic Compression allgather_object broadcast_object broadcast_optimizer_state broadcast_parameters
allreduce allreduce_async allreduce_ allreduce_async_ grouped_allreduce grouped_allreduce_async grouped_allreduce_
grouped_allreduce_async_ sparse_allreduce_async allgather allgather_async grouped_allgather grouped_allgather_async
broadcast broadcast_async broadcast_ broadcast_async_ alltoall alltoall_async reducescatter reducescatter_async
grouped_reducescatter grouped_reducescatter_async join barrier poll synchronize init shutdown is_initialized
start_timeline stop_timeline size local_size cross_size rank local_rank cross_rank mpi_threads_supported mpi_enabled
mpi_built gloo_enabled gloo_built nccl_built ddl_built ccl_built cuda_built rocm_built sycl_built ProcessSet global_process_set
add_process_set remove_process_set Average Sum Adasum Min Max Product HorovodInternalError DistributedOptimizer
SyncBatchNorm
"""
IN_MPI_OPS_ONLY = """
is_homogeneous handle_average_backwards_compatibility _basics _handle_map HorovodAllreduce HorovodGroupedAllreduce HorovodAllgather
HorovodGroupedAllgather HorovodBroadcast HorovodAlltoall HorovodReducescatter HorovodGroupedReducescatter
"""

# Names, then the parameters they share. FACTORS and G are written out below.
TABLE = """
shutdown is_initialized rank size local_rank local_size cross_rank cross_size mpi_threads_supported stop_timeline: -
mpi_built gloo_built nccl_built ddl_built ccl_built cuda_built rocm_built sycl_built mpi_enabled gloo_enabled: -
init: comm=None, process_sets=None
start_timeline: file_path, mark_cycles=False
allreduce: tensor, average=None, name=None, compression=none, op=None, FACTORS, G
allreduce_async allreduce_ allreduce_async_: tensor, average=None, name=None, op=None, FACTORS, G
grouped_allreduce: tensors, average=None, name=None, compression=none, op=None, FACTORS, G
grouped_allreduce_async grouped_allreduce_ grouped_allreduce_async_: tensors, average=None, name=None, op=None, FACTORS, G
sparse_allreduce_async: tensor, name, op, G
allgather allgather_async: tensor, name=None, G
grouped_allgather grouped_allgather_async: tensors, name=None, G
broadcast broadcast_async broadcast_ broadcast_async_: tensor, root_rank, name=None, G
alltoall alltoall_async: tensor, splits=None, name=None, G
reducescatter: tensor, name=None, compression=none, op=0, G, FACTORS
reducescatter_async: tensor, name=None, op=0, G, FACTORS
grouped_reducescatter: tensors, name=None, compression=none, op=0, G, FACTORS
grouped_reducescatter_async: tensors, name=None, op=0, G, FACTORS
join: device=-1
barrier: G
poll synchronize: handle
broadcast_parameters: params, root_rank
broadcast_object: obj, root_rank=0, name=None, G
allgather_object: obj, name=None
broadcast_optimizer_state: optimizer, root_rank, model=None
DistributedOptimizer: optimizer, named_parameters=None, compression=none, backward_passes_per_step=1, op=0, \
gradient_predivide_factor=1.0, num_groups=0, groups=None, sparse_as_dense=False, G
ProcessSet: ranks_or_comm
add_process_set remove_process_set: process_set
SyncBatchNorm: num_features, eps=1e-5, momentum=0.1, affine=True, track_running_stats=True
"""
SHORT = {"FACTORS": "prescale_factor=1.0, postscale_factor=1.0", "G": "process_set=world", "-": ""}


def signatures() -> dict[str, Callable[..., Any]]:
    """Functions that have just the parameters of the table."""
    found = {}
    for line in TABLE.strip().splitlines():
        names, _, listed = line.partition(": ")
        text = ", ".join(SHORT.get(each, each) for each in listed.split(", "))
        function = eval(
            f"lambda {text}: None", {"none": Compression.none, "world": global_process_set}
        )
        found.update(dict.fromkeys(names.split(), function))
    return found


SIGNATURES = signatures()


def parameters(function: Callable[..., Any]) -> list[tuple[str, Any, Any]]:
    return [
        (each.name, each.kind, each.default)
        for each in inspect.signature(function).parameters.values()
    ]


def test_every_name_is_there() -> None:
    assert set(NAMES.split()) == set(hvd.__all__)


@pytest.mark.parametrize("name", SIGNATURES)
def test_the_signature(name: str) -> None:
    """What we have beyond Horovod's parameters can be given by keyword only."""
    found = [
        each
        for each in parameters(getattr(hvd, name))
        if each[1] is not inspect.Parameter.KEYWORD_ONLY
    ]
    assert found == parameters(SIGNATURES[name])


def test_every_function_is_in_the_table() -> None:
    functions = {name for name in hvd.__all__ if inspect.isfunction(getattr(hvd, name))}
    assert functions <= set(SIGNATURES)


@pytest.mark.parametrize(
    "module", ["mpi_ops", "functions", "optimizer", "compression", "sync_batch_norm", "elastic"]
)
def test_submodules_can_be_imported(module: str) -> None:
    assert importlib.import_module(f"allstep.torch.{module}") is getattr(hvd, module)


def test_what_horovod_keeps_in_mpi_ops() -> None:
    from allstep.torch import mpi_ops

    assert all(hasattr(mpi_ops, name) for name in IN_MPI_OPS_ONLY.split())
    assert not set(IN_MPI_OPS_ONLY.split()) & set(hvd.__all__)
    elsewhere = [
        name
        for name in hvd.__all__
        if inspect.isfunction(getattr(hvd, name)) and not hasattr(mpi_ops, name)
    ]
    assert sorted(elsewhere) == [
        "DistributedOptimizer",
        "allgather_object",
        "broadcast_object",
        "broadcast_optimizer_state",
        "broadcast_parameters",
    ]


def test_the_numbers_of_the_reductions() -> None:
    """Plain numbers: scripts print, compare and pickle them."""
    numbers = [hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product]
    assert numbers == [0, 1, 2, 3, 4, 5]
    assert {type(number) for number in numbers} == {int}


def test_the_exceptions() -> None:
    """`except RuntimeError` in a script catches what goes wrong between ranks."""
    from allstep.hvd import exceptions

    assert hvd.HorovodInternalError is exceptions.HorovodInternalError
    assert issubclass(hvd.HorovodInternalError, RuntimeError)
    assert exceptions.HostsUpdatedInterrupt(True).skip_sync is True
    wrong = exceptions.HorovodVersionMismatchError("torch", "1.0", "2.0")
    assert isinstance(wrong, ImportError)
    assert (wrong.name, wrong.version, wrong.installed_version) == ("torch", "1.0", "2.0")
