"""Each worker's environment gives TensorFlow, XLA and MXNet its share of the cores."""

import os
import shutil
import subprocess
import sys

import pytest

from support.allstep_command import run
from support.ranks import clean_environment

NAMES = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "PJRT_NPROC", "XLA_FLAGS")
UNSET = dict.fromkeys([*NAMES, "NPROC"], "")
PRINT = "echo " + " ".join(f"${{{name}:--}}" for name in NAMES)
ONE_THREAD = "--xla_cpu_multi_thread_eigen=false"
SHARE = max(1, len(os.sched_getaffinity(0)) // 2)
AS_ROOT = ["--allow-run-as-root"] if os.geteuid() == 0 else []

pytestmark = pytest.mark.usefixtures("processes")


def of_worker(*arguments: str, **env: str) -> str:
    """What rank 0 of `allstep run` has in its environment."""
    done = run("run", *arguments, "sh", "-c", PRINT, env=UNSET | env)
    assert done.code == 0, done.err
    return next(line for line in done.out.splitlines() if line.startswith("[0] "))[4:]


def test_every_framework_gets_the_share() -> None:
    flags = ONE_THREAD if SHARE == 1 else "-"
    assert of_worker("-np", "2") == f"{SHARE} {SHARE} {SHARE} {flags}"


def test_what_the_user_set_stays() -> None:
    given = {"TF_NUM_INTRAOP_THREADS": "5", "PJRT_NPROC": "6", "XLA_FLAGS": "--xla_dump_to=/x"}
    printed = of_worker("-np", "1", OMP_NUM_THREADS="1", **given)
    assert printed == f"1 5 6 --xla_dump_to=/x {ONE_THREAD}"


INIT = f"""
import os
import allstep.torch as hvd

def line():
    return " ".join(os.environ.get(name) or "-" for name in {NAMES})

hvd.init()
during = line()
hvd.barrier()
hvd.shutdown()
# One write, so that the lines of the ranks do not mix.
os.write(1, f"{{during}}; {{line()}}\\n".encode())
"""


@pytest.mark.usefixtures("peers")
def test_under_mpirun_init_does_it() -> None:
    mpirun = shutil.which("mpirun.openmpi") or shutil.which("mpirun") or pytest.skip("needs mpirun")
    launch = [mpirun, *AS_ROOT, "--oversubscribe", "--bind-to", "none", "-np", "2"]
    done = subprocess.run(
        [*launch, sys.executable, "-c", INIT],
        env=clean_environment() | UNSET | {"XLA_FLAGS": "--xla_dump_to=/x"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    flags = f"--xla_dump_to=/x {ONE_THREAD}" if SHARE == 1 else "--xla_dump_to=/x"
    expected = f"{SHARE} {SHARE} {SHARE} {flags}; - - - --xla_dump_to=/x"
    assert done.stdout.splitlines() == [expected] * 2
