"""The public face: every name of Horovod 0.28.1's `horovod.mxnet`, with its parameters."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from support.ranks import Ranks

NAMES = """
allreduce allreduce_ grouped_allreduce grouped_allreduce_ allgather grouped_allgather broadcast
broadcast_ alltoall reducescatter grouped_reducescatter broadcast_object allgather_object
broadcast_parameters Compression DistributedOptimizer DistributedTrainer Average Sum Adasum Min Max
Product ProcessSet global_process_set add_process_set remove_process_set init shutdown
is_initialized start_timeline stop_timeline size local_size cross_size rank local_rank cross_rank
mpi_threads_supported mpi_enabled mpi_built gloo_enabled gloo_built nccl_built ddl_built ccl_built
cuda_built rocm_built sycl_built
"""
# Names, then the parameters they share.
TABLE = """
shutdown is_initialized rank size local_rank local_size cross_rank cross_size mpi_threads_supported stop_timeline: -
mpi_built gloo_built nccl_built ddl_built ccl_built cuda_built rocm_built sycl_built mpi_enabled gloo_enabled: -
init: comm=None, process_sets=None
start_timeline: file_path, mark_cycles=False
allreduce allreduce_: tensor, average=None, name=None, priority=0, FACTORS, PS, op=None
grouped_allreduce grouped_allreduce_: tensors, average=None, name=None, priority=0, FACTORS, PS, op=None
allgather: tensor, name=None, priority=0, PS
grouped_allgather: tensors, name=None, priority=0, PS
broadcast broadcast_: tensor, root_rank, name=None, priority=0, PS
alltoall: tensor, splits=None, name=None, priority=0, PS
reducescatter: tensor, op=0, name=None, priority=0, PS, FACTORS
grouped_reducescatter: tensors, op=0, name=None, priority=0, PS, FACTORS
broadcast_object: obj, root_rank=0, name=None
allgather_object: obj, name=None
broadcast_parameters: params, root_rank=0, prefix=None
DistributedOptimizer: optimizer, gradient_predivide_factor=1.0, num_groups=0, PS
DistributedTrainer: params, optimizer, optimizer_params=None, compression='none', gradient_predivide_factor=1.0, \
prefix=None, num_groups=0, PS
ProcessSet: ranks_or_comm
add_process_set remove_process_set: process_set
"""
SHORT = {
    "FACTORS": "prescale_factor=1.0, postscale_factor=1.0",
    "PS": "process_set='world'",
    "-": "",
}


def parameters(function: Callable[..., Any]) -> list[tuple[str, str, str]]:
    return [
        (each.name, each.kind.name, repr(each.default))
        for each in inspect.signature(function).parameters.values()
    ]


def listed() -> dict[str, list[tuple[str, str, str]]]:
    """The parameters of the table, by name."""
    found = {}
    for line in TABLE.strip().splitlines():
        names, _, given = line.partition(": ")
        text = ", ".join(SHORT.get(each, each) for each in given.split(", "))
        found.update(dict.fromkeys(names.split(), parameters(eval(f"lambda {text}: None"))))
    return found


def described() -> dict[str, Any]:
    """Runs in a rank: what the package offers."""
    import sys

    import allstep.mxnet as hvd
    from allstep.hvd import process_sets
    from allstep.mxnet import compression, functions, mpi_ops

    known = {hvd.global_process_set: "world", hvd.Compression.none: "none"}

    def named_defaults(function: Callable[..., Any]) -> list[tuple[str, str, str]]:
        return [
            (each.name, each.kind.name, repr(known.get(each.default, each.default)))
            for each in inspect.signature(function).parameters.values()
        ]

    elsewhere = {"DistributedOptimizer", "DistributedTrainer", "broadcast_parameters"}
    in_modules = {*vars(mpi_ops), *vars(functions), *vars(compression)}
    return {
        "names": set(hvd.__all__),
        "signatures": {name: named_defaults(getattr(hvd, name)) for name in listed()},
        "functions": {each for each in hvd.__all__ if inspect.isfunction(getattr(hvd, each))},
        "numbers": [hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product],
        "same sets": hvd.ProcessSet is process_sets.ProcessSet,
        "not in a module": set(hvd.__all__) - elsewhere - in_modules,
        "others": {"tensorflow", "keras", "jax", "allstep.torch"} & set(sys.modules),
    }


@pytest.mark.usefixtures("peers")
def test_names_and_signatures(ranks: Ranks) -> None:
    (found,) = ranks(1, described)
    assert found["names"] == set(NAMES.split())
    assert found["functions"] <= set(listed())
    assert found["signatures"] == listed()
    assert found["numbers"] == [0, 1, 2, 3, 4, 5]
    assert found["same sets"]
    assert found["not in a module"] == set()
    assert found["others"] == set()
