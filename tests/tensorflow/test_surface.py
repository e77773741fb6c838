"""Every name and signature of Horovod's TensorFlow API, against a list."""

import importlib
import inspect
import subprocess
import sys

import pytest

from allstep.launch.horovod import FOLDER
from support.ranks import Ranks

pytestmark = pytest.mark.usefixtures("peers")

NAMES = """
init shutdown is_initialized start_timeline stop_timeline size local_size cross_size rank local_rank
cross_rank mpi_threads_supported mpi_enabled mpi_built gloo_enabled gloo_built nccl_built ddl_built
ccl_built cuda_built rocm_built sycl_built is_homogeneous
size_op rank_op local_rank_op local_size_op process_set_included_op
allreduce grouped_allreduce reducescatter grouped_reducescatter allgather grouped_allgather broadcast
broadcast_ alltoall join broadcast_variables broadcast_global_variables
BroadcastGlobalVariablesHook broadcast_object broadcast_object_fn allgather_object
DistributedOptimizer DistributedGradientTape PartialDistributedGradientTape SyncBatchNormalization
Compression elastic ProcessSet global_process_set add_process_set remove_process_set
Average Sum Adasum Min Max Product LocalGradientAggregationHelper
"""

# G stands for process_set=global_process_set, P for the two factors, C for compression=none.
SIGNATURES = {
    "size_op": "process_set_id=0, name=None",
    "rank_op": "name=None",
    "local_rank_op": "name=None",
    "local_size_op": "name=None",
    "process_set_included_op": "process_set_id=0, name=None",
    "allreduce": "tensor, average=None, device_dense='', device_sparse='', C, op=None, P, name=None,"
    " G, ignore_name_scope=False",
    "grouped_allreduce": "tensors, average=None, device_dense='', device_sparse='', C, op=None, P, G,"
    " ignore_name_scope=False, name=None",
    "reducescatter": "tensor, device_dense='', C, op=0, name=None, G, ignore_name_scope=False, P",
    "grouped_reducescatter": "tensors, device_dense='', C, op=0, G, P",
    "allgather": "tensor, name=None, ignore_name_scope=False, G",
    "grouped_allgather": "tensors, name=None, ignore_name_scope=False, G",
    "broadcast": "tensor, root_rank, name=None, ignore_name_scope=False, G",
    "broadcast_": "variables, root_rank, name=None, G",
    "alltoall": "tensor, splits=None, name=None, ignore_name_scope=False, G",
    "join": "",
    "broadcast_variables": "variables, root_rank, G, inplace=False",
    "broadcast_global_variables": "root_rank",
    "BroadcastGlobalVariablesHook": "root_rank, device=''",
    "broadcast_object": "obj, root_rank=0, session=None, name=None, G",
    "broadcast_object_fn": "root_rank=0, session=None, name=None, G",
    "allgather_object": "obj, session=None, name=None, G",
    "DistributedGradientTape": "gradtape, device_dense='', device_sparse='', C,"
    " sparse_as_dense=False, op=0, gradient_predivide_factor=1.0, num_groups=0, groups=None, G,"
    " scale_local_gradients=True",
    "PartialDistributedGradientTape": "gradtape, device_dense='', device_sparse='', C,"
    " sparse_as_dense=False, op=0, gradient_predivide_factor=1.0, num_groups=0, groups=None, G,"
    " local_layers=None, scale_local_gradients=True",
    "DistributedOptimizer": "optimizer, name=None, use_locking=False, device_dense='',"
    " device_sparse='', C, sparse_as_dense=False, backward_passes_per_step=1, op=0,"
    " gradient_predivide_factor=1.0, average_aggregated_gradients=False, num_groups=0, groups=None,"
    " G, scale_local_gradients=True",
    "SyncBatchNormalization": "fused=False, **kwargs",
    "elastic.run": "func",
    "elastic.TensorFlowState": "variables=None, session=None, **kwargs",
    "elastic.TensorFlowKerasState": "model, optimizer=None, backend=None, **kwargs",
}
SHORT = {
    "G": "process_set=PS",
    "P": "prescale_factor=1.0, postscale_factor=1.0",
    "C": "compression=NONE",
}


# The modules that scripts import from.
MODULES = ["compression", "elastic", "functions", "gradient_aggregation", "mpi_ops"]
MODULES += ["sync_batch_norm"]


def expected(text: str) -> list[str]:
    """The parameters of a signature, in the form of `found`."""
    parts = [part for part in text.split(", ") if part]
    return ", ".join(SHORT.get(part, part) for part in parts).split(", ") if parts else []


def surface() -> None:
    # TensorFlow itself imports Keras 3, which imports other frameworks that are installed.
    import tensorflow

    assert tensorflow.__version__
    before = set(sys.modules)
    import allstep.tensorflow as hvd

    assert not {"keras", "tf_keras", "jax", "mxnet"} & (set(sys.modules) - before)

    def found(name: str) -> list[str]:
        thing = hvd
        for part in name.split("."):
            thing = getattr(thing, part)
        defaults = {hvd.global_process_set: "PS", hvd.Compression.none: "NONE"}
        return [
            str(each.replace(annotation=inspect.Parameter.empty))
            if each.default is inspect.Parameter.empty
            else f"{each.name}={defaults.get(each.default, repr(each.default))}"
            for each in inspect.signature(thing).parameters.values()
        ]

    assert sorted(hvd.__all__) == sorted([*NAMES.split(), "HorovodInternalError"])
    for name in NAMES.split():
        assert getattr(hvd, name) is not None, name
    for name, text in SIGNATURES.items():
        assert found(name) == expected(text), name
    for module in MODULES:
        importlib.import_module(f"allstep.tensorflow.{module}")
    sys.path.insert(0, str(FOLDER))
    named = importlib.import_module("horovod.tensorflow")
    # Other projects use these: GRACE and ElasticDL, and scripts that copy from Horovod's tests.
    assert named.util._executing_eagerly() and named._executing_eagerly()
    assert named._allreduce is named.mpi_ops._allreduce
    assert named._LegacyOptimizer is tensorflow.compat.v1.train.Optimizer
    assert named.mpi_ops._basics.size is hvd.size
    assert all(getattr(named.mpi_ops, name) is getattr(hvd, name) for name in NAMES.split())
    aggregation = importlib.import_module("horovod.tensorflow.gradient_aggregation")
    assert aggregation.LocalGradientAggregationHelper is hvd.LocalGradientAggregationHelper
    with tensorflow.Graph().as_default():
        assert not named.util._executing_eagerly()


def test_names_and_signatures_are_those_of_the_contract(ranks: Ranks) -> None:
    ranks(1, surface)


def test_the_shared_layer_imports_no_framework_but_torch() -> None:
    text = (
        "import sys, allstep.torch, allstep.hvd.gradient_list; "
        "print(*sorted({'tensorflow', 'keras', 'tf_keras', 'jax', 'mxnet'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, check=True, timeout=90
    )
    assert done.stdout.strip() == ""
