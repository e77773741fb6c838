"""`allstep run --min-np ... allstep train`: requeue, prepared replacements, lines of the launcher.

`scontrol` is a script that records its calls.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from allstep import runlog
from allstep.comm.join.membership import Membership
from allstep.train.checkpoint import write_and_read as checkpoint
from allstep.train.health.stop_request import Stopping
from allstep.train.run.duties import Duties
from allstep.train.run.prepare import prepare
from allstep.train.run.train_request import TrainRequest
from allstep.train.run.worlds.changes import Totals
from allstep.train.run.worlds.generations import Generations, _Facts
from allstep.train.run.worlds.standby import prepare_standby
from support.allstep_command import start
from support.hosts import Hosts
from support.ranks import clean_environment, wait_until

OVERRIDES = ["digits", "batch=50", "log_every=1", "precision=float32", "execution=plain"]

# Prints when a worker builds the job that it had prepared once more, while the others wait.
DRIVER = """
import sys
from allstep.cli.app import app
from allstep.train.run.worlds import generations

make_job = generations.make_job


def noted(*args, **options):
    print("built again", flush=True)
    return make_job(*args, **options)


generations.make_job = noted
app(sys.argv[1:])
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Return the environment of a Slurm job whose `scontrol` writes its calls to a file."""
    program = tmp_path / "bin" / "scontrol"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path / "calls"}\n')
    program.chmod(0o755)
    path = f"{program.parent}:{os.environ['PATH']}"
    clean = {**clean_environment(), "OMP_NUM_THREADS": "1"}
    return {**clean, "PATH": path, "SLURM_JOB_ID": "77"}


def command(folder: Path, launch: list[str], *arguments: str) -> list[str]:
    driver = folder / "driver.py"
    driver.write_text(DRIVER)
    start = [sys.executable, "-m", "allstep", "run", *launch, sys.executable, str(driver)]
    return [*start, "train", *OVERRIDES, "--requeue", *arguments]


@pytest.mark.usefixtures("processes")
@pytest.mark.timeout(300)
def test_a_lost_rank_0_is_replaced_without_out_and_its_successor_requeues(
    environment: dict[str, str], tmp_path: Path
) -> None:
    """Worker 1 is rank 0 when the run is stopped; worker 2 has joined with its prepared job."""
    output = tmp_path / "output"
    launch = ["-np", "2", "--min-np", "1", "--fault", "kill@rank=0,step=20"]
    with output.open("w") as file:
        run = subprocess.Popen(
            command(tmp_path, launch, "epochs=20000"),
            cwd=tmp_path,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
        try:

            def has_joined() -> bool:
                assert run.poll() is None, output.read_text()
                return "1 worker joined" in output.read_text()

            wait_until(has_joined, 150)
            run.send_signal(signal.SIGTERM)
            assert run.wait(100) == 75, output.read_text()
        finally:
            run.kill()
            run.wait(30)
    text = output.read_text()
    assert (tmp_path / "calls").read_text() == "requeue 77\n", text
    assert text.count("requeued Slurm job 77") == 1
    assert "built again" not in text
    # One line for each change, none of them the launcher's.
    lines = [line for line in text.splitlines() if "lost rank 0" in line or "joined (" in line]
    assert len(lines) == 2 and "generation 1" not in text, text
    assert "; 1 worker continues from sample 950 after" in lines[0]
    assert "1 worker joined (rank 1 on localhost); 2 workers continue" in lines[1]
    assert "1 worker lost, 1 joined, " in text and ", 0 samples lost" in text
    (folder,) = (tmp_path / "runs").iterdir()
    moves = [each for each in runlog.read(folder / "run.jsonl").events if "position" in each]
    assert [each["lost_workers"] for each in moves] == [["rank 0 on localhost"], []]
    assert [each["joined_workers"] for each in moves] == [[], ["rank 1 on localhost"]]


@pytest.mark.usefixtures("processes")
@pytest.mark.timeout(300)
def test_a_worker_that_saves_alone_requeues(environment: dict[str, str], tmp_path: Path) -> None:
    """The replacement starts after 1 s, when the time is over."""
    launch = ["-np", "2", "--min-np", "2", "--elastic-timeout", "1"]
    launch += ["--fault", "kill@rank=0,step=20"]
    done = subprocess.run(
        command(tmp_path, launch, "epochs=2", "--out", "run"),
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    text = done.stdout + done.stderr
    assert done.returncode == 75, text
    assert (tmp_path / "calls").read_text() == "requeue 77\n", text
    assert text.count("requeued Slurm job 77") == 1
    assert "stopped and saved after 950 of" in text
    assert "1 worker lost, 0 joined, " in text, text


@pytest.mark.parametrize("has_out", [True, False], ids=["--out", "without --out"])
def test_a_prepared_job_moves_to_the_run_folder(
    has_out: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without --out the others send the folder: run files and lists of bad samples follow."""
    monkeypatch.chdir(tmp_path)
    out = Path("runs") / "digits"
    out.mkdir(parents=True)
    config = prepare(OVERRIDES[0], OVERRIDES[1:]).config.resolved(2)
    (out / "config.yaml").write_text(config.to_yaml())
    # A list of another run in the current folder does not count.
    bad = '{"number": 1, "file": "x", "offset": 0, "reason": "y", "epoch": 0}\n'
    Path("quarantine-rank3.jsonl").write_text(bad)
    asked = TrainRequest(OVERRIDES[0], OVERRIDES[1:], out=out if has_out else None)
    standby = prepare_standby(asked, 2, 3)
    worker = Generations(Membership("x"), Duties(), Stopping(), lambda world: None, standby)
    job = worker._job_of(_Facts(config, out, Totals()))
    assert job is standby[1] and job.out == out
    paths = {name: loader._quarantine.path for name, loader in job.loaders.items()}
    assert paths == {
        "train": out / "quarantine-rank3.jsonl",
        "validation": out / "quarantine-validation-rank3.jsonl",
        "test": out / "quarantine-test-rank3.jsonl",
    }
    assert all(loader.num_bad == 0 for loader in job.loaders.values())


@pytest.mark.timeout(300)
def test_the_other_host_continues_without_that_of_rank_0(two_hosts: Hosts, tmp_path: Path) -> None:
    """h1 has the launcher, h2 has rank 0 until its agent is killed; both see the run folder."""
    out = tmp_path / "run"
    launch = ["-H", "h2:1,h1:1", "-np", "2", "--min-np", "1", "--ssh", two_hosts.ssh]
    launch += ["--fault", "kill-agent@rank=0,step=20"]
    run = start(
        *command(tmp_path, launch, "epochs=20000", "--out", str(out)),
        command=[],
        prefix=two_hosts.prefix(0),
        env={"OMP_NUM_THREADS": "1"},
    )

    def moves() -> list[Mapping[str, Any]]:
        events = runlog.read(out / "run.jsonl").events if (out / "run.jsonl").exists() else ()
        return [each for each in events if "position" in each]

    try:
        wait_until(lambda: moves() or run.poll() is not None, 150)
        if run.poll() is None:
            run.send_signal(signal.SIGTERM)
        printed, errors = run.communicate(timeout=100)
    finally:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
            run.communicate()
    assert run.returncode == 75, printed + errors
    (move,) = moves()
    assert move["lost_workers"] == ["rank 0 on h2"] and move["workers"] == 1, move
    assert move["text"].startswith("lost host h2: "), move["text"]
    record = runlog.read(out / "run.jsonl")
    positions = [step["samples"] for step in record.steps]
    # The same record, continued: no step is missing but the one after whose update h2 was lost.
    assert positions == sorted(set(positions)) and positions[-1] > move["position"]
    assert len(record.starts) == 1
    saved = checkpoint.written(out / "checkpoints")[0]
    assert int(saved.name) == positions[-1]
