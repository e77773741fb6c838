"""The job scripts of docs/preemption.md on a real Slurm of two nodes: signals, requeue, lost nodes.

The scripts are run as they are printed there, with another recipe and fewer tasks per node.
"""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from allstep.launch.hosts.srun import expand_nodes
from support.ranks import clean_environment
from support.slurm import Slurm

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "preemption.md").read_text()
SCRIPTS = {
    re.search(r"--job-name=(\S+)", script)[1]: script
    for script in re.findall(r"```bash\n(#!/bin/bash\n.*?)```", PAGE, re.DOTALL)
}
# An epoch of 21 steps, a checkpoint after each epoch that is the best so far.
LONG = "digits epochs=20000 log_every=100000"

ELASTIC = """
import json, os, signal, sys, time
import torch
import allstep.torch as hvd

if os.environ.get("SAVES"):
    signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))
hvd.init()
model = torch.nn.Linear(3, 2).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
state = hvd.elastic.TorchState(model, optimizer, step=0, sizes=[])
calls = 0

@hvd.elastic.run
def train(state):
    global calls
    since = 0
    # Until it has done some steps alone.
    while since < 5 or os.environ.get("SAVES"):
        since += hvd.size() == 1
        optimizer.zero_grad()
        model(torch.full((4, 3), 1.0, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
        calls += 1
        state.step += 1
        state.sizes = [*state.sizes, hvd.size()]
        if state.step == 5:
            print("stepping", flush=True)
        if since == 5:
            print("alone", flush=True)
        time.sleep(0.02)
        state.commit()

train(state)
print("result", state.step, calls, "".join(map(str, state.sizes)), flush=True)
"""


class Submitted:
    """A job of the cluster, with its output in a file."""

    def __init__(self, slurm: Slurm, folder: Path, name: str, *options: str, **env: str) -> None:
        self.slurm, self.out = slurm, folder / "out.txt"
        script = folder / "job.sh"
        script.write_text(SCRIPTS[name].replace("train cifar10 ", f"train {LONG} "))
        (folder / "train.py").write_text(ELASTIC)
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        env = {**clean_environment(), **slurm.env, "PATH": path, **env}
        command = ["sbatch", "--parsable", f"--output={self.out}", "--ntasks-per-node=1", *options]
        done = subprocess.run(
            [*command, str(script)],
            cwd=folder,
            env={name: value for name, value in env.items() if name not in ("COLUMNS", "LINES")},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        self.number = done.stdout.strip()

    def text(self) -> str:
        return self.out.read_text() if self.out.exists() else ""

    def control(self, *command: str) -> str:
        done = self.slurm.run(command)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def field(self, name: str) -> str:
        return re.search(rf"\b{name}=(\S+)", self.control("scontrol", "show", "job", self.number))[
            1
        ]

    def wait(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + 100
        while not condition():
            if time.monotonic() > end:
                logs = "".join(
                    self.slurm.supervisor.log(f"{each}.log")[-1500:]
                    for each in ("slurmctld", "slurmd.node1")
                )
                pytest.fail(f"job {self.number}:\n{self.text()}\n{logs}")
            time.sleep(0.2)

    def wait_for(self, text: str, times: int = 1) -> None:
        self.wait(lambda: self.text().count(text) >= times)

    def signal_step(self, name: str, node: str) -> None:
        """Signal the job step of a node."""
        # Slurm 22.05 delivers the signal and reports "Invalid job id" nevertheless.
        self.slurm.run(["scancel", "-s", name, self.step_on(node)])

    def step_on(self, node: str) -> str:
        steps = self.control("squeue", "-h", "-s", "-j", self.number, "-o", "%i %N").splitlines()
        return next(
            step
            for step, name in map(str.split, steps)
            if name == node and not step.endswith("batch")
        )

    def ended(self) -> int:
        """Wait for the end of the job; return its exit code."""
        self.wait(lambda: self.field("JobState") in ("COMPLETED", "FAILED"))
        return int(self.field("ExitCode").partition(":")[0])

    def cancel(self) -> None:
        self.slurm.run(["scancel", self.number])
        self.wait(lambda: not self.slurm.run(["squeue", "-h", "-j", self.number]).stdout.strip())


@pytest.fixture
def submit(slurm_two_nodes: Slurm, tmp_path: Path):
    jobs: list[Submitted] = []

    def start(name: str, *options: str, **env: str) -> Submitted:
        jobs.append(Submitted(slurm_two_nodes, tmp_path, name, *options, **env))
        return jobs[-1]

    yield start
    for job in jobs:
        job.cancel()


def has_checkpoint(folder: Path, run: str) -> bool:
    return bool(list((folder / "runs" / run / "checkpoints").glob("[0-9]*")))


def test_the_scripts_are_those_of_the_page() -> None:
    assert set(SCRIPTS) == {"fixed", "elastic", "elastic-script", "one-node", "plain-srun"}
    assert all("scontrol" not in script for script in SCRIPTS.values())


@pytest.mark.timeout(300)
def test_a_signal_to_all_nodes_saves_and_requeues(submit, tmp_path: Path) -> None:
    job = submit("fixed")
    job.wait(lambda: has_checkpoint(tmp_path, "cifar10"))
    nodes = job.control("scontrol", "show", "hostnames", "node[1-2]").split()
    assert nodes == expand_nodes("node[1-2]")
    job.control("scancel", "-s", "USR1", job.number)
    job.wait(lambda: job.field("Restarts") == "1")
    text = job.text()
    assert "allstep run: 2 workers on 2 hosts: node1 has rank 0, node2 has rank 1" in text
    assert text.count("note: stopped and saved after") == 1
    assert "SIGUSR1" in text and "JOB REQUEUE" in text


@pytest.mark.timeout(300)
def test_a_requeued_job_resumes_and_is_requeued_no_more_than_asked(
    submit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        SCRIPTS,
        "one-node",
        SCRIPTS["one-node"].replace("--requeue\n", "--requeue --max-requeues 1\n"),
    )
    job = submit("one-node", "--ntasks=1")
    job.wait(lambda: has_checkpoint(tmp_path, "one-node"))
    job.control("scancel", "--batch", "-s", "USR1", job.number)
    job.wait(lambda: job.field("Restarts") == "1")
    # Slurm would wait for two minutes. A start within about a second of the end of the first one
    # fails: "Job credential revoked".
    job.wait(lambda: job.field("JobState") == "PENDING" and job.slurm.is_idle())
    job.control("scontrol", "update", f"JobId={job.number}", "StartTime=now+4seconds")
    job.wait_for("  resumes    after ")
    assert "it was requeued 1 times, --max-requeues is 1" in job.text()
    epochs = job.text().count("validation")
    job.wait(lambda: job.text().count("validation") > epochs)
    job.control("scancel", "--batch", "-s", "TERM", job.number)
    assert job.ended() == 75
    assert job.text().count("note: stopped and saved after") == 2
    assert "not requeued: it was requeued 1 times" in job.text()


@pytest.mark.timeout(300)
def test_a_signal_to_one_node_makes_it_leave_and_nothing_is_lost(submit) -> None:
    job = submit("elastic-script")
    job.wait_for("stepping", 2)
    job.signal_step("USR1", "node2")
    assert job.ended() == 0
    text = job.text()
    assert "node2 received signal 10 and leaves; generation 1 has 1 workers" in text
    # Each step was computed once: that of the state, and none was repeated.
    step, calls, sizes = re.search(r"result (\d+) (\d+) (\d+)", text).groups()
    assert step == calls and re.fullmatch("2{5,}1{5,}", sizes), text


@pytest.mark.timeout(300)
def test_a_lost_node_is_one_lost_host(submit) -> None:
    """Its job step is killed, as with the node; later a signal to all that is left stops the run."""
    job = submit("elastic-script", SAVES="1")
    job.wait_for("stepping", 2)
    job.signal_step("KILL", "node2")
    job.wait_for("alone")
    assert "allstep run: lost host node2: the connection to it ended" in job.text()
    job.control("scancel", "-s", "USR1", job.number)
    assert job.ended() == 75


@pytest.mark.timeout(300)
def test_an_elastic_run_continues_without_a_node_and_is_requeued_by_what_is_left(
    submit, tmp_path: Path
) -> None:
    """The node of rank 1 is lost; then a signal to all that is left saves and requeues, once."""
    job = submit("elastic")
    job.wait(lambda: has_checkpoint(tmp_path, "elastic"))
    job.signal_step("KILL", "node2")
    job.wait_for("1 worker continues from sample ")
    job.control("scancel", "-s", "USR1", job.number)
    job.wait(lambda: job.field("Restarts") == "1")
    text = job.text()
    lost = (
        r"note: lost host node2: the connection to it ended.*; 1 worker lost \(rank 1 on node2\);"
    )
    assert re.search(lost, text), text
    assert text.count("note: stopped and saved after") == 1
    # Slurm may end the job before the line about it is printed.
    assert text.count("requeued Slurm job") <= 1 and "not requeued" not in text
    assert "1 worker lost, 0 joined, " in text


@pytest.mark.timeout(300)
def test_plain_srun_resumes_from_the_newest_checkpoint(submit, tmp_path: Path) -> None:
    fault = "kill@rank=1,step=30"
    job = submit("plain-srun", ALLSTEP_FAULTS=fault)
    assert job.ended() == 137
    lost = "lost rank 1"
    assert lost in job.text()
    assert "`allstep run --srun --min-np N allstep train ...` would have continued" in job.text()
    assert has_checkpoint(tmp_path, "plain-srun")
    job = submit("plain-srun")
    job.wait_for("  resumes    after ")
    job.control("scancel", "-s", "USR1", job.number)
    job.wait(lambda: job.field("Restarts") == "1")
