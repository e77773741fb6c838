"""Signals that agents receive, as Slurm sends them to the processes of a job step."""

import os
import signal
import sys
from pathlib import Path

import pytest

from allstep.launch.run_events import HostSignaled, SendSignal
from allstep.launch.run_state import HostRanks, RunState
from allstep.launch.signals.by_host import SignalsByHost
from allstep.process.family import descendants
from support.allstep_command import run, start

# Reports how often it has received a signal, some time after the first one.
COUNTING = """
import signal, sys, time
received = []
for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, lambda number, frame: received.append(number))
print("up", flush=True)
while not received:
    time.sleep(0.05)
time.sleep(1)
print("received", *map(int, received), flush=True)
sys.exit(75)
"""


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    ("reaches", "number", "options"),
    [
        # Slurm's proctrack/pgid, or a user.
        ("agents", signal.SIGUSR1, []),
        # Slurm's other plugins.
        ("all below", signal.SIGTERM, []),
        # `scancel --full`, and the end of a job's time.
        ("all", signal.SIGTERM, []),
        ("agents", signal.SIGUSR2, ["--stop-signal", "USR2"]),
    ],
)
def test_each_worker_receives_a_signal_once(
    reaches: str, number: signal.Signals, options: list[str]
) -> None:
    hosts = ["-H", "localhost:1,127.0.0.1:1"]
    process = start("run", *hosts, *options, sys.executable, "-c", COUNTING)
    assert process.stdout is not None
    for _ in range(2):
        assert "up" in process.stdout.readline()
    below = descendants(process.pid)
    agents = [pid for pid in below if parent(pid) == process.pid]
    assert len(agents) == 2
    # Stopped meanwhile, so that no process acts before all have their signal, also on a busy machine.
    for pid in (process.pid, *agents):
        os.kill(pid, signal.SIGSTOP)
    for pid in {"agents": agents, "all below": below, "all": [process.pid, *below]}[reaches]:
        os.kill(pid, number)
    for pid in (*agents, process.pid):
        os.kill(pid, signal.SIGCONT)
    out, err = process.communicate(timeout=60)
    assert out.count(f"received {number.value}\n") == 2, out
    assert (process.returncode, err) == (75, "")


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.usefixtures("processes")
def test_srun_outside_an_allocation_is_one_line() -> None:
    done = run("run", "--srun", "true", env={"SLURM_JOB_ID": ""})
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert "allstep: --srun: this is not a Slurm allocation" in done.err
    done = run("run", "--stop-signal", "KILL", "-np", "1", "true")
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)


def test_one_signaled_host_stops_a_fixed_run() -> None:
    """Its ranks will be lost, and the others cannot continue without them."""
    state = RunState([HostRanks("a", [0]), HostRanks("b", [1])], grace=30, lost=10)
    state.take(HostSignaled(1.0, 1, signal.SIGUSR1))
    assert state.decide(1.0) == [SendSignal(signal.SIGUSR1)]
    state.take(HostSignaled(1.1, 0, signal.SIGUSR1))
    assert state.decide(1.1) == []


def test_a_signal_to_all_hosts_within_a_second() -> None:
    signals = SignalsByHost()
    signals.add(10, 0, 5.0)
    assert signals.is_waiting and signals.take(5.5, {0, 1}) == []
    signals.add(10, 1, 5.9)
    assert signals.take(5.9, {0, 1}) == [(10, None)]
    assert not signals.is_waiting and signals.take(9.0, {0, 1}) == []


def test_a_signal_to_some_hosts() -> None:
    signals = SignalsByHost()
    signals.add(10, 0, 5.0)
    signals.add(15, 2, 5.5)
    assert signals.take(5.9, {0, 1, 2}) == []
    assert signals.take(6.0, {0, 1, 2}) == [(10, frozenset({0}))]
    # Host 1 is lost meanwhile, host 0 has received it, too.
    signals.add(15, 0, 6.2)
    assert signals.take(6.2, {0, 2}) == [(15, None)]
