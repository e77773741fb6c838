"""A caller that ignores SIGCHLD, as some daemons do: exit codes are still those of the workers.

While SIGCHLD is ignored the kernel discards the exit status of children, and the setting is
inherited by what a program executes.
"""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

import allstep
from allstep.process.family import keep_exit_codes
from support.allstep_command import ALLSTEP, run

pytestmark = pytest.mark.usefixtures("processes")

# `allstep` in a process that was executed with SIGCHLD ignored.
PREFIX = [
    sys.executable,
    "-c",
    "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); "
    "os.execvp(sys.argv[1], sys.argv[1:])",
]


@pytest.mark.parametrize(("fails", "code"), [("sys.exit(5)", 5), ("os.kill(os.getpid(), 9)", 137)])
def test_a_failed_worker_is_reported(fails: str, code: int) -> None:
    worker = f"import os, sys, time\nif os.environ['ALLSTEP_RANK'] == '1': {fails}\ntime.sleep(60)"
    done = run("run", "-np", "2", sys.executable, "-c", worker, prefix=PREFIX, limit=50)
    assert done.code == code
    assert "rank 1 on localhost failed first of 2" in done.err


def test_a_function_that_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ValueError("boom")

    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with pytest.raises(RuntimeError, match="boom"):
            allstep.run(fail, num_proc=1)
        assert signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_it_is_restored() -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with keep_exit_codes():
            assert subprocess.run(["false"]).returncode == 1
        assert signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGCHLD, before)


@pytest.mark.parametrize("command", [["train", "digits", "epochs=1"], ["eval", "nothing"]])
def test_variables_of_a_run_that_has_ended(tmp_path: Path, command: list[str]) -> None:
    """A shell that inherited a worker's environment: one line, exit status 2."""
    stale = {
        "ALLSTEP_RANK": "0",
        "ALLSTEP_SIZE": "1",
        "ALLSTEP_LOCAL_RANK": "0",
        "ALLSTEP_LOCAL_SIZE": "1",
        "ALLSTEP_CROSS_RANK": "0",
        "ALLSTEP_CROSS_SIZE": "1",
        "ALLSTEP_STORE": "127.0.0.1:5",
        "ALLSTEP_TOKEN": "aa",
        "ALLSTEP_START_TIMEOUT": "2",
    }
    done = run(*command, env=stale, cwd=tmp_path, limit=60)
    assert done.code == 2, done.err
    assert "Traceback" not in done.err
    assert ALLSTEP and len(done.err.strip().splitlines()) == 1
