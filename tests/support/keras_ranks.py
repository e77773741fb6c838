"""Checks with Keras on several ranks, for each of its backends.

    @on_backends
    def test_callbacks(ranks, backend):
        run_keras_checks(ranks, backend, check_a, check_b)

All checks of a test run in the same processes: starting them and importing a backend is what takes
time. Keras is imported only there, after the fork.
"""

import os
import sys
from collections.abc import Callable

import numpy as np
import pytest

from support.ranks import Ranks

Check = Callable[[], None]

BACKENDS = ("torch", "tensorflow", "jax")
XLA_FLAGS = (
    "--xla_cpu_multi_thread_eigen=false --xla_backend_optimization_level=0"
    " intra_op_parallelism_threads=1"
)
"""One thread, and no optimization of compiled code: it runs a few times, and compiling it takes most
of the time of a test."""
on_backends = pytest.mark.parametrize("backend", BACKENDS)


def run_keras_checks(
    ranks: Ranks, backend: str, *checks: Check, num_ranks: int = 2, timeout: float = 170
) -> None:
    """Run the checks one after the other, with hvd initialized and another seed on each rank."""
    env = {
        "KERAS_BACKEND": backend,
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "TF_NUM_INTRAOP_THREADS": "1",
        "TF_NUM_INTEROP_THREADS": "1",
        "XLA_FLAGS": XLA_FLAGS,
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_X64": "1",
    }
    ranks(num_ranks, _call, checks, env=env, timeout=timeout)


def _call(checks: tuple[Check, ...]) -> None:
    if os.environ["KERAS_BACKEND"] != "tensorflow":
        # Keras imports it if it is there, to recognize its datasets, and that takes seconds.
        sys.modules["tensorflow"] = None  # type: ignore[assignment]
    import keras
    from keras.src.backend.common import dtypes

    from allstep.hvd.basics import init, rank, shutdown
    from allstep.hvd.objects import allgather_object

    # Keras computes in float32 even where floatx is float64, except on TensorFlow.
    dtypes.BIT64_TO_BIT32_DTYPE["float64"] = "float64"
    init()
    for check in checks:
        keras.utils.set_random_seed(rank() + 1)
        print("-----", check.__name__, flush=True)
        check()
        # A rank that failed has ended, so the others do not begin the next check.
        allgather_object(check.__name__, "end of check")
    shutdown()


def all_equal(value: object) -> bool:
    """Return whether all ranks have this list of arrays."""
    from allstep.hvd.objects import allgather_object

    found = allgather_object([np.array(each) for each in value])  # type: ignore[attr-defined]
    return all(
        len(found[0]) == len(other)
        and all(np.array_equal(a, b) for a, b in zip(found[0], other, strict=True))
        for other in found
    )
