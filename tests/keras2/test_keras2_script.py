"""The example in the style of old Horovod scripts, unmodified, under two launchers."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support import allstep_command
from support.ranks import clean_environment

SCRIPT = Path(__file__).parents[2] / "examples" / "horovod_keras2.py"
SETTINGS = {"TF_USE_LEGACY_KERAS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}

pytestmark = pytest.mark.usefixtures("peers", "processes")


def check(output: str, *kinds: str) -> None:
    """Each kind of optimizer trained, and one worker printed an accuracy far above chance."""
    found = re.findall(r"(\S+) on 2 workers: loss \d\.\d+, accuracy (\d+\.\d)%", output)
    assert [kind for kind, _ in found] == list(kinds), output
    assert all(float(accuracy) > 60 for _, accuracy in found), output


def test_under_allstep_run() -> None:
    command = ["run", "--as-horovod", "-np", "2", sys.executable, SCRIPT]
    done = allstep_command.run(*command, env=SETTINGS, limit=150)
    assert done.code == 0, done.out + done.err
    check(done.out, "Adam", "legacy.Adam")


def test_under_mpirun() -> None:
    mpirun = shutil.which("mpirun.openmpi") or shutil.which("mpirun")
    if mpirun is None:
        pytest.skip("needs Open MPI")
    as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    folders = [allstep_command.run("horovod-path").out.strip(), str(SCRIPT.parents[1] / "src")]
    start = [mpirun, *as_root, "--oversubscribe", "-np", "2", sys.executable, str(SCRIPT)]
    done = subprocess.run(
        [*start, "legacy.Adam"],
        env={**clean_environment(), **SETTINGS, "PYTHONPATH": os.pathsep.join(folders)},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    check(done.stdout, "legacy.Adam")
