"""`allstep.keras.DistributedOptimizer` on the three backends of Keras 3.

The reference is the plain optimizer on one worker, with the same global batches, in float64.
"""

from pathlib import Path

import pytest

from support import keras_checks
from support.ranks import Ranks

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
    "looks_like_the_wrapped_one",
    "names_and_signatures",
    "wrong_arguments",
    "xla_is_refused_on_tensorflow",
]


def settings(backend: str) -> dict[str, str]:
    """The environment of a worker with one core."""
    return {
        "KERAS_BACKEND": backend,
        "HOROVOD_DYNAMIC_PROCESS_SETS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "TF_NUM_INTRAOP_THREADS": "1",
        "TF_NUM_INTEROP_THREADS": "1",
        "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
    }


@pytest.mark.usefixtures("peers")
@pytest.mark.parametrize("backend", BACKENDS)
def test_two_workers(ranks: Ranks, tmp_path: Path, backend: str) -> None:
    ranks(2, keras_checks.run, CHECKS, tmp_path, env=settings(backend), timeout=150)


@pytest.mark.usefixtures("peers")
@pytest.mark.parametrize("backend", BACKENDS)
def test_three_workers(ranks: Ranks, tmp_path: Path, backend: str) -> None:
    checks = ["momentum_matches", "uneven_batches_match", "apply_reduces"]
    checks += ["local_variables_stay_local"]
    ranks(3, keras_checks.run, checks, tmp_path, env=settings(backend), timeout=150)


@pytest.mark.usefixtures("peers")
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_lost_rank_inside_fit_is_horovods_error(ranks: Ranks, backend: str) -> None:
    outcomes = ranks.outcomes(2, keras_checks.lose_a_rank, env=settings(backend), timeout=120)
    assert [outcome.exit_code for outcome in outcomes] == [0, -9], outcomes[0].output
    assert outcomes[0].result < 5
