"""`allstep.keras.DistributedOptimizer` on the three backends of Keras 3.

The reference is the plain optimizer on one worker, with the same global batches, in float64.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from support import keras_checks
from support.keras_ranks import XLA_FLAGS
from support.ranks import Ranks, clean_environment

# Prints, for each file, the class of the optimizer, the inner class and the loss scale.
LOADED = """if True:
    import os, sys
    if os.environ["KERAS_BACKEND"] != "tensorflow":
        # Keras imports it if it is there, and that takes seconds.
        sys.modules["tensorflow"] = None
    import keras, numpy
    for name in sys.argv[1:]:
        model = keras.saving.load_model(name)
        made = model.optimizer
        inner = getattr(made, "inner_optimizer", made)
        scale = float(getattr(made, "dynamic_scale", 1))
        assert int(inner.iterations) > 0
        assert numpy.shape(model(numpy.zeros((1, 5), "float32"))) == (1, 2)
        # On torch, Keras has classes of its own for some optimizers.
        assert {type(each).__module__.split(".")[0] for each in (made, inner)} == {"keras"}
        print(type(made).__name__, type(inner).__name__, scale)
    assert "allstep" not in sys.modules
"""
BACKENDS = ["torch", "tensorflow", "jax"]
CHECKS = [
    "workers_match_one",
    "policies_match",
    "passes_accumulate",
    "sums_and_compression",
    "callbacks_replace_ffi",
    "small_floats",
    "apply_reduces",
    "local_variables_stay_local",
    "process_sets_reduce_among_themselves",
    "gradient_may_be_a_variable",
    "missing_gradients",
    "rows_are_gathered",
    "tape_is_reduced_once",
    "all_skip_an_infinity",
    "saved_models_are_plain",
    "saved_mixed_models_are_plain",
    "looks_like_the_wrapped_one",
    "names_and_signatures",
    "wrong_arguments",
    "xla_is_refused_on_tensorflow",
    "another_compile_is_left_alone",
]
# Many checks in one process of each rank: slow on a busy machine.
pytestmark = pytest.mark.timeout(500)

ALONE = [
    "momentum_matches",
    "apply_reduces",
    "local_variables_stay_local",
    "gradient_may_be_a_variable",
    "rows_are_gathered",
    "callbacks_of_one_worker",
]


def settings(backend: str) -> dict[str, str]:
    """The environment of a worker with one core."""
    return {
        "KERAS_BACKEND": backend,
        "HOROVOD_DYNAMIC_PROCESS_SETS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "TF_NUM_INTRAOP_THREADS": "1",
        "TF_NUM_INTEROP_THREADS": "1",
        "XLA_FLAGS": XLA_FLAGS,
    }


@pytest.mark.usefixtures("peers")
@pytest.mark.parametrize("backend", BACKENDS)
def test_two_workers(ranks: Ranks, tmp_path: Path, backend: str) -> None:
    ranks(2, keras_checks.run, CHECKS, tmp_path, ALONE, env=settings(backend), timeout=300)
    # What they have saved loads without allstep.
    files = [tmp_path / f"{backend}-0.keras", tmp_path / f"{backend}-mixed-0.keras"]
    done = subprocess.run(
        [sys.executable, "-c", LOADED, *map(str, files)],
        env={**clean_environment(), **settings(backend), "JAX_ENABLE_X64": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "Adam Adam 1.0",
        "LossScaleOptimizer Adam 16384.0",
    ]


@pytest.mark.usefixtures("peers")
@pytest.mark.parametrize("backend", BACKENDS)
def test_three_workers(ranks: Ranks, tmp_path: Path, backend: str) -> None:
    checks = ["momentum_matches", "uneven_batches_match", "apply_reduces"]
    checks += ["local_variables_stay_local"]
    ranks(3, keras_checks.run, checks, tmp_path, env=settings(backend), timeout=300)


@pytest.mark.usefixtures("peers")
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_lost_rank_inside_fit_is_horovods_error(ranks: Ranks, backend: str) -> None:
    outcomes = ranks.outcomes(2, keras_checks.lose_a_rank, env=settings(backend), timeout=120)
    assert [outcome.exit_code for outcome in outcomes] == [0, -9], outcomes[0].output
    assert outcomes[0].result < 5
