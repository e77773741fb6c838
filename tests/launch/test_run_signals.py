"""Signals to a launcher: forwarded to the workers, and SIGKILL after the grace time."""

import contextlib
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from allstep.process.family import descendants
from support.allstep_command import start
from support.ranks import clean_environment, wait_until

pytestmark = pytest.mark.usefixtures("processes")

SH = ["sh", "-c"]


SAVING = """
import signal, sys, time
def save(number, frame):
    print("saving after signal", number, flush=True)
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
signal.signal(signal.SIGUSR1, save)
print("up", flush=True)
time.sleep(100)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_is_forwarded_so_that_workers_can_save(number: signal.Signals) -> None:
    process = start("run", "-np", "2", sys.executable, "-c", SAVING)
    for _ in range(2):
        assert "up" in process.stdout.readline()
    process.send_signal(number)
    out, err = process.communicate(timeout=50)
    assert out.count(f"saving after signal {number.value}") == 2
    assert (process.returncode, err) == (75, "")


def test_a_worker_that_ignores_the_signal_is_killed_after_the_grace_time() -> None:
    process = start(
        "run", "-np", "1", "--grace", "0.5", *SH, "trap '' TERM; echo up; sleep 100; sleep 100"
    )
    assert "up" in process.stdout.readline()
    began = time.monotonic()
    process.terminate()
    process.communicate(timeout=50)
    assert process.returncode == 143
    assert 0.4 < time.monotonic() - began < 20  # the default is 30 s


PATIENT = (
    "from allstep import cli; from allstep.launch import run_state; run_state._STOP_SECONDS = 100;"
    " cli.main()"
)


def test_ctrl_c_stops_and_a_second_one_kills() -> None:
    """After one the workers have 3 s; here 100, so that we see who has ended them also where all is
    slow."""
    deaf = [
        *SH,
        "trap 'echo no' INT; echo up; while :; do sleep 0.1; done",
    ]  # a trap waits for the command that runs
    process = subprocess.Popen(
        [sys.executable, "-c", PATIENT, "run", "-np", "2", "--grace", "100", *deaf],
        stdout=subprocess.PIPE,
        text=True,
        env=clean_environment(),
        start_new_session=True,
    )
    for line in ("up", "no"):
        for _ in range(2):
            assert line in process.stdout.readline()
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130


QUICK_TO_GIVE_UP = (
    "from allstep import cli; from allstep.launch import run_state; run_state._GIVE_UP_SECONDS ="
    " 1.0; cli.main()"
)


def test_a_stopped_agent_does_not_keep_a_run_that_must_end() -> None:
    """As a debugger would stop it. The promise is 10 s after SIGKILL; here 1."""
    worker = (
        "import os, time; print(os.getpid(), flush=True); os.kill(os.getppid(), 19);"
        " time.sleep(1000)"
    )
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            QUICK_TO_GIVE_UP,
            "run",
            "-np",
            "1",
            "--grace",
            "0.2",
            sys.executable,
            "-c",
            worker,
        ],
        stdout=subprocess.PIPE,
        text=True,
        env=clean_environment(),
        start_new_session=True,
    )
    # The agent may be stopped before it has passed the line on: then its worker is found otherwise.
    wait_until(lambda: any(state == "T" for _, state in below(process.pid)))
    family = [pid for pid, _ in below(process.pid)]
    process.terminate()
    process.communicate(timeout=50)
    assert process.returncode == 143
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in family))


def below(root: int) -> list[tuple[int, str]]:
    """Pid and state of the processes below one."""
    found = []
    for pid in descendants(root):
        with contextlib.suppress(OSError):
            found.append((pid, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]))
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_a_host_is_late_ends_the_run(tmp_path: Path, number: signal.Signals) -> None:
    """One host has sent its hello, the other has not: there is no worker yet whose end would be the
    run's."""
    (tmp_path / "ssh").write_text(f"#!/bin/sh\ntouch {tmp_path}/called\nexec sleep 1000\n")
    (tmp_path / "ssh").chmod(0o755)
    process = start("run", "-H", "localhost:1,far.invalid:1", "--ssh", tmp_path / "ssh", "true")
    wait_until((tmp_path / "called").exists)
    wait_until(lambda: catches(process.pid, signal.SIGUSR1))
    time.sleep(0.3)  # most likely the hello of the one is there
    process.send_signal(number)
    process.communicate(timeout=20)
    assert process.returncode == 128 + number


def catches(pid: int, number: signal.Signals) -> bool:
    caught = Path(f"/proc/{pid}/status").read_text().partition("SigCgt:")[2].split()[0]
    return bool(int(caught, 16) >> (number - 1) & 1)
