"""The example in Horovod's style, unmodified, under two launchers."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from allstep import machine
from support import allstep_command
from support.ranks import clean_environment

SCRIPT = Path(__file__).parents[2] / "examples" / "horovod_mxnet.py"

# Runs the script, then asks the OpenMP library that MXNet has loaded in a thread of its own: a new
# thread has the number that the library read from the environment.
WITH_THREADS = """
import ctypes, runpy, sys, threading
runpy.run_path(sys.argv[1], run_name="__main__")
openmp = ctypes.CDLL("libgomp.so.1")
ask = threading.Thread(target=lambda: print(f"threads of MXNet: {openmp.omp_get_max_threads()}\\n"))
ask.start()
ask.join()
"""

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
    options = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    # No worker is bound to cores, so without our limit each would use all of them.
    options += ["--oversubscribe", "--bind-to", "none", "-np", "2"]
    folders = [allstep_command.run("horovod-path").out.strip(), str(SCRIPT.parents[1] / "src")]
    env = {**clean_environment(), "PYTHONPATH": os.pathsep.join(folders)}
    env.pop("OMP_NUM_THREADS", None)
    done = subprocess.run(
        [mpirun, *options, sys.executable, "-c", WITH_THREADS, str(SCRIPT)],
        env=env,
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    check(done.stdout)
    share = max(1, machine.allowed_cores() // 2)
    assert re.findall(r"threads of MXNet: (\d+)", done.stdout) == [str(share)] * 2, done.stdout
