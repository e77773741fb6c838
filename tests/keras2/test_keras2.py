"""`allstep.keras2` and `allstep.tensorflow.keras` with TF_USE_LEGACY_KERAS=1, on two and three workers.

The reference is the plain optimizer on one worker, with the same global batches, in float64.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support import keras2_checks
from support.ranks import Ranks, clean_environment

# Many checks in one process of each rank: slow on a busy machine.
pytestmark = [pytest.mark.usefixtures("peers"), pytest.mark.timeout(500)]

CHECKS = [
    "workers_match_one",
    "passes_and_compression",
    "apply_reduces",
    "gradient_may_be_a_variable",
    "rows_and_passes",
    "computed_gradients_are_reduced",
    "ended_variables_are_forgotten",
    "local_variables_stay_local",
    "tape_is_reduced_once",
    "infinities_are_skipped_together",
    "begins_alike",
    "differences_raise_on_all_ranks",
    "elastic_state",
    "errors_before_a_fit_are_forgotten",
    "saved_models_are_plain",
    "wrong_arguments",
    "names_and_signatures",
    *keras2_checks.EXACT,
    *keras2_checks.MIXED,
    "graph_matches_one",
]
SETTINGS = {
    "TF_USE_LEGACY_KERAS": "1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TF_NUM_INTRAOP_THREADS": "1",
    "TF_NUM_INTEROP_THREADS": "1",
}


def test_two_workers(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, keras2_checks.run, CHECKS, tmp_path, env=SETTINGS, timeout=300)
    # What they have saved loads without allstep.
    code = """if True:
        import sys, tf_keras
        for name in sys.argv[1:]:
            model = tf_keras.models.load_model(name)
            assert type(model.optimizer).__module__.startswith("tf_keras.src.optimizers"), name
            assert model.predict([[0.0] * 5], verbose=0).shape == (1, 2)
        assert "allstep" not in sys.modules
    """
    files = sorted(tmp_path.glob("*-0.*"))
    assert len(files) == 4
    subprocess.run(
        [sys.executable, "-c", code, *map(str, files)],
        env={**clean_environment(), **SETTINGS},
        check=True,
        timeout=100,
    )


def test_three_workers_of_which_one_is_lost_inside_fit(ranks: Ranks) -> None:
    outcomes = ranks.outcomes(3, keras2_checks.lose_a_rank, env=SETTINGS, timeout=150)
    assert [outcome.exit_code for outcome in outcomes] == [0, 0, -9], outcomes[0].output
    assert max(outcome.result for outcome in outcomes[:2]) < 5


def test_a_graph_in_a_session(ranks: Ranks) -> None:
    ranks(2, keras2_checks.graph_mode, env=SETTINGS, timeout=150)


def test_without_tf_keras_the_package_is_named() -> None:
    code = "import sys; sys.modules['tf_keras'] = None; import allstep.keras2"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.stderr.rstrip().endswith(
        "ImportError: allstep.keras2 needs Keras 2: pip install tensorflow tf-keras"
    )


def test_another_backend_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import allstep.tensorflow.keras"],
        env={**os.environ, "KERAS_BACKEND": "torch", "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert "ImportError: allstep.tensorflow.keras found the Keras backend 'torch'" in done.stderr
    assert "import allstep.keras as hvd" in done.stderr
