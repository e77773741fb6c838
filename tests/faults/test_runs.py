"""Faults in real runs: scripts under `allstep run`, and `allstep train`."""

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from allstep.faults import parse_all
from support.allstep_command import Done, run
from support.ranks import clean_environment

pytestmark = pytest.mark.usefixtures("processes")

PAGE = Path(__file__).parent.parent.parent / "docs" / "faults.md"

SCRIPT = """
import time, torch
import allstep.torch as hvd

hvd.init()
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters()
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
for step in range(1, 7):
    began = time.monotonic()
    time.sleep(0.02)
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    weights = [value for each in model.parameters() for value in each.flatten().tolist()]
    print("step", hvd.rank(), step, time.monotonic() - began, *weights, flush=True)
"""


@dataclass(frozen=True)
class Step:
    """A line of the script."""

    rank: int
    number: int
    seconds: float
    weights: tuple[float, ...]


def script_run(tmp_path: Path, *faults: str, env: dict[str, str] | None = None) -> Done:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    options = [option for fault in faults for option in ("--fault", fault)]
    return run("run", "-np", "2", *options, script, env=env)


def steps_of(done: Done) -> dict[tuple[int, int], Step]:
    lines = [line.split()[2:] for line in done.out.splitlines() if "] step " in line]
    steps = [Step(int(a), int(b), float(c), tuple(map(float, rest))) for a, b, c, *rest in lines]
    return {(step.rank, step.number): step for step in steps}


def test_a_script_that_survives_its_faults(tmp_path: Path) -> None:
    """Faults of the command line and of the environment, and one that does not occur."""
    done = script_run(
        tmp_path,
        "stop:0.6@rank=1,step=2",
        "slow:5@rank=0,step=3-4",
        "kill@rank=1,step=5000",
        env={"ALLSTEP_FAULTS": "flip@rank=1,step=5;nan@rank=0,step=6"},
    )
    assert done.code == 0, done.err
    steps = steps_of(done)
    assert len(steps) == 12
    # On the clocks of the victims: a busy machine may delay the other rank at the same time.
    assert steps[1, 2].seconds > 0.6
    # 0.02 s of work become 0.1 s; a sleep is shorter by what the one before was too long.
    assert steps[0, 3].seconds + steps[0, 4].seconds > 0.19
    assert steps[0, 4].weights == steps[1, 4].weights
    assert sum(a != b for a, b in zip(steps[0, 5].weights, steps[1, 5].weights, strict=True)) == 1
    # The NaN of one rank reaches all through the mean gradient.
    assert {str(value) for rank in (0, 1) for value in steps[rank, 6].weights} == {"nan"}
    for line in (
        "[1] allstep: fault stop:0.6@rank=1,step=2: rank 1 stops for 0.6 s (SIGSTOP) at step 2",
        "[0] allstep: fault slow:5@rank=0,step=3-4: rank 0 slows down by a factor of 5 at step 3",
        "[1] allstep: fault flip@rank=1,step=5: rank 1 flips one bit of its weights at step 5",
        "[0] allstep: fault nan@rank=0,step=6: rank 0 makes its loss NaN at step 6",
        "allstep run: fault kill@rank=1,step=5000 did not occur",
    ):
        assert done.err.count(line) == 1, done.err


@pytest.mark.parametrize(
    ("fault", "code", "texts"),
    [
        (
            "kill@rank=1,step=3,during=update",
            137,
            ["rank 1 on localhost failed first", "signal 9 (SIGKILL)"],
        ),
        ("kill-agent@rank=1,step=2", 1, ["host localhost is lost: its agent was killed"]),
    ],
)
@pytest.mark.soak
def test_a_script_that_fails(tmp_path: Path, fault: str, code: int, texts: list[str]) -> None:
    done = script_run(tmp_path, fault)
    assert done.code == code, done.err
    for text in (f"(injected fault: {fault})", f"allstep: fault {fault}: rank ", *texts):
        assert text in done.err, done.err
    assert "did not occur" not in done.err
    assert (0, 1) in steps_of(done) and (0, 5) not in steps_of(done)


@pytest.mark.parametrize(
    ("command", "complaint"),
    [
        (["run", "-np", "2", "--fault", "kil@step=5", "true"], "did you mean 'kill'?"),
        (["run", "-np", "2", "--fault", "kill@rank=2", "true"], "did you mean rank=1?"),
        (["train", "digits", "--workers", "2", "--fault", "kill@rank=2"], "did you mean rank=1?"),
    ],
)
def test_a_wrong_fault_is_one_line(tmp_path: Path, command: list[str], complaint: str) -> None:
    done = run(*command, cwd=tmp_path)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("allstep: fault 'k") and done.err.rstrip().endswith(complaint)
    assert done.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_variable_is_one_line(tmp_path: Path) -> None:
    done = run("run", "-np", "2", "true", env={"ALLSTEP_FAULTS": "kill@stp=1"})
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "unknown place 'stp'; did you mean 'step'?" in done.err


def test_missing_faults_are_named_without_a_launcher() -> None:
    env = {**clean_environment(), "ALLSTEP_FAULTS": "hang@step=9;raise@op=1"}
    code = "import allstep, torch.distributed as dist; allstep.init(); dist.barrier()"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1 and "injected by fault raise@op=1" in done.stderr
    assert re.findall("fault (.*) did not occur", done.stderr) == ["hang@step=9"]


def test_the_faults_of_the_page_are_valid() -> None:
    found = re.findall(r"--fault (\S+@\S+)", PAGE.read_text())
    quoted = re.findall(r"ALLSTEP_FAULTS='([^']+)'", PAGE.read_text())
    known = [fault for text in [*found, *quoted] if "KIND" not in text for fault in parse_all(text)]
    assert len(known) > 4


# Training

SHORT = ["digits", "epochs=1", "precision=float32", "log_every=5", "--workers", "2"]


def train_run(tmp_path: Path, *faults: str, overrides: tuple[str, ...] = ()) -> Done:
    options = [option for fault in faults for option in ("--fault", fault)]
    return run("train", *SHORT, *overrides, "--out", tmp_path / "out", *options, cwd=tmp_path)


def events_of(tmp_path: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (tmp_path / "out" / "run.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == "event"]


def test_a_training_that_survives_its_faults(tmp_path: Path) -> None:
    done = train_run(
        tmp_path,
        "stop:0.3@rank=1,step=2",
        "slow:3@rank=1,step=4-8",
        "disk-full@commit=1",
        "corrupt@rank=0,sample=17",
        "hang@rank=1,step=5000",
        "random:kill@every=3600",
    )
    assert done.code == 0, done.err
    events = {event["fault"]: event for event in events_of(tmp_path) if "fault" in event}
    assert {name: event["rank"] for name, event in events.items()} == {
        "stop:0.3@rank=1,step=2": 1,
        "slow:3@rank=1,step=4-8": 1,
        "disk-full@commit=1": 0,
        "corrupt@rank=0,sample=17": 0,
    }
    assert all(done.err.count(event["text"]) == 1 for event in events.values()), done.err
    assert any("No space left on device" in event["text"] for event in events_of(tmp_path))
    # Written again at the end of the run, when the disk has room.
    assert len(list((tmp_path / "out" / "checkpoints").iterdir())) == 1
    missing = [line for line in done.err.splitlines() if "did not occur" in line]
    assert missing == [
        "allstep run: fault hang@rank=1,step=5000 did not occur",
        "allstep run: fault random:kill@every=3600,seed=0 did not occur",
    ]
