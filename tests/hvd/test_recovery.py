"""Each front-end's elastic state, with real workers that are killed and replaced.

The reference is one process that never loses a worker, in numpy. `hvd_scripts/recover.py` trains
one front-end after the other, so that the imports of a framework are paid once.
"""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from support.allstep_command import run

SCRIPT = Path(__file__).parent.parent / "hvd_scripts" / "recover.py"
SETTINGS = {"TF_CPP_MIN_LOG_LEVEL": "3", "JAX_PLATFORMS": "cpu"}
STEPS = 8

pytestmark = [pytest.mark.usefixtures("peers"), pytest.mark.timeout(400)]


def undisturbed() -> list[np.ndarray]:
    """Return kernel and bias after all steps on the whole batches."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=(STEPS, 12, 3)).astype("float32").astype(float)
    y = generator.normal(size=(STEPS, 12, 2)).astype("float32").astype(float)
    kernel, bias = np.full((3, 2), 0.1), np.full(2, 0.2)
    velocities = [np.zeros_like(kernel), np.zeros_like(bias)]
    for inputs, targets in zip(x, y, strict=True):
        outer = 2 * (inputs @ kernel + bias - targets) / targets.size
        for weight, velocity, gradient in zip(
            (kernel, bias), velocities, (inputs.T @ outer, outer.sum(0)), strict=True
        ):
            velocity[...] = 0.9 * velocity - 0.1 * gradient
            weight += velocity
    return [kernel, bias]


@pytest.mark.parametrize(
    ("backend", "blocked", "names", "faults"),
    [
        ("torch", "tensorflow", ["torch", "keras"], ["rank=1,step=4", "rank=0,step=13"]),
        ("jax", "tensorflow", ["keras"], ["rank=0,step=4"]),
        # The replacement of rank 1 has taken 19 steps before the fourth training.
        (
            "tensorflow",
            "-",
            ["tensorflow", "graph", "keras", "keras2"],
            ["rank=1,step=4", "rank=0,step=13", "rank=2,step=22", "rank=1,step=23"],
        ),
    ],
    ids=["torch", "jax", "tensorflow"],
)
def test_a_killed_worker_is_replaced(
    backend: str, blocked: str, names: list[str], faults: list[str], tmp_path: Path
) -> None:
    """The others return to the last commit, and the new worker takes their state."""
    given = [text for fault in faults for text in ("--fault", f"kill@{fault}")]
    command = [sys.executable, SCRIPT, tmp_path, blocked, *names]
    env = {**SETTINGS, "KERAS_BACKEND": backend}
    done = run("run", "-np", "3", "--min-np", "2", *given, *command, env=env, limit=380)
    assert done.code == 0, done.out + done.err
    lines = [line.partition("result ")[2] for line in done.out.splitlines() if "result " in line]
    found = [json.loads(line) for line in lines]
    for name in names:
        results = sorted(each[1:] for each in found if each[0] == name)
        assert [rank for rank, *_ in results] == [0, 1, 2], (name, done.out, done.err)
        for _, sizes, kernel, bias in results:
            assert len(sizes) == STEPS and sizes[0] == sizes[-1] == 3 and 2 in sizes, (name, sizes)
            # Of numbers around 1, in float32.
            np.testing.assert_allclose(kernel, undisturbed()[0], atol=1e-5, err_msg=name)
            np.testing.assert_allclose(bias, undisturbed()[1], atol=1e-5, err_msg=name)
