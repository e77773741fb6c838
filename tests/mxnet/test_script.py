"""The example in Horovod's style, unmodified, under two launchers."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support import allstep_command
from support.ranks import clean_environment

SCRIPT = Path(__file__).parents[2] / "examples" / "horovod_mxnet.py"

pytestmark = pytest.mark.usefixtures("peers", "processes")


def check(output: str) -> None:
    """The losses of three epochs, printed by one worker, and an accuracy far above chance."""
    losses = [float(loss) for loss in re.findall(r"epoch \d: loss (\d\.\d+)", output)]
    assert len(losses) == 3 and losses[0] > 2 * losses[2], output
    (accuracy,) = re.findall(r"2 workers: accuracy (\d+\.\d)%", output)
    assert float(accuracy) > 90, output


def test_under_allstep_run() -> None:
    done = allstep_command.run("run", "--as-horovod", "-np", "2", sys.executable, SCRIPT)
    assert done.code == 0, done.out + done.err
    check(done.out)


def test_under_mpirun() -> None:
    mpirun = shutil.which("mpirun.openmpi") or shutil.which("mpirun")
    if mpirun is None:
        pytest.skip("needs Open MPI")
    as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    path = allstep_command.run("horovod-path").out.strip()
    done = subprocess.run(
        [mpirun, *as_root, "--oversubscribe", "-np", "2", sys.executable, str(SCRIPT)],
        env={**clean_environment(), "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    check(done.stdout)
