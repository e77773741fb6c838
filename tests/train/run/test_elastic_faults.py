"""Each kind of fault in each phase of an elastic run: of `allstep train`, and of a script with
`hvd.elastic`. No sample is lost, no process hangs, and none is left.

One run has the faults of one kind, one for each phase:

```
rank 2   while the first world forms        rank 1   in the update of step 16
rank 0   in the reduction of step 8         rank 3   when a worker joins, in the broadcast
```

Rank 4 has none: on a slow machine the others may be lost before the first worker joins. A rank that
was cut off or stopped stays alive, so there another one is killed for a worker to join.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import SOAK
from support import counted_train
from support.allstep_command import processes_with
from support.counted_samples import assert_each_counts_once, counted_steps, links_of
from support.elastic_training import (
    ALLSTEP,
    OVERRIDES,
    LastStep,
    assert_same_checkpoint,
    command,
    last_checkpoint,
    long_chain,
    started,
    stop,
    wait_for_step,
)
from support.ranks import Ranks, shared_memory_files, wait_until

# A member that has not finished a step gets 32 s until it is killed (`Policy.grace_of`).
pytestmark = [pytest.mark.usefixtures("processes"), pytest.mark.timeout(600 if SOAK else 300)]

PHASES = (
    "@rank=2,during=forming",
    "@rank=0,step=8,during=reduce",
    "@rank=1,step=16,during=update",
    "@rank=3,during=broadcast",
)
SURVIVED = ("stop:0.5", "cut")
# The others wait for a rank that hangs until this time is over.
ENVIRONMENT = {"ALLSTEP_TIMEOUT": "6"}


def faults_of(kind: str) -> list[str]:
    helps = ["kill@rank=2,step=24"] if kind in SURVIVED else []
    return [*(f"{kind}{phase}" for phase in PHASES), *helps]


def faults_of_script(kind: str) -> list[str]:
    """A script forms its first world in `hvd.init()`, where it cannot recover from a rank that
    hangs: it ends with an error that names the rank (tests/engine)."""
    return faults_of(kind)[1 if kind == "hang" else 0 :]


def options(faults: list[str]) -> list[str]:
    return [word for fault in faults for word in ("--fault", fault)]


def wait_for_faults(run: subprocess.Popen[str], output: Path, faults: list[str]) -> None:
    """Wait until each of the faults has occurred."""

    def have_occurred() -> bool:
        text = output.read_text()
        assert run.poll() is None, text
        return all(f"fault {fault}: rank " in text for fault in faults)

    wait_until(have_occurred, 240, f"the faults {faults}")


def assert_nothing_left(folder: Path) -> None:
    wait_until(lambda: not processes_with(str(folder)), 60, "the end of all processes")
    wait_until(lambda: not shared_memory_files(), 60, "an empty /dev/shm")


@pytest.mark.parametrize(
    "kind", ["cut", *(["kill", "exit:3", "raise", "stop:0.5", "hang"] if SOAK else [])]
)
@pytest.mark.soak(1)
def test_training(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    """The final files are those of a run that was restored at each change of the world."""
    run, output, epochs = tmp_path / "run", tmp_path / "output", "epochs=1000"
    program = [sys.executable, counted_train.__file__]
    arguments = command(run, epochs, *options(faults_of(kind)), workers=5, program=program)
    env = {**ENVIRONMENT, "COUNTED_SAMPLES": str(tmp_path), "COUNTED_PAUSE": "0.05"}
    with started(arguments, output, env) as training:
        wait_for_faults(training, output, faults_of(kind))
        position = wait_for_step(training, run, output, 5, beyond=0)
        wait_for_step(training, run, output, 5, beyond=position)
        stop(training, output)
    assert_nothing_left(tmp_path)
    steps = counted_steps(tmp_path, int(last_checkpoint(run).name))
    assert_each_counts_once(steps)
    parts = links_of(steps, run)
    long_chain(ranks, [*OVERRIDES, epochs], tmp_path / "reference", parts, timeout=200)
    assert_same_checkpoint(run, tmp_path / "reference")


# The gradient of step n is n on every rank, so the weight after n steps is an exact sum.
SCRIPT = """
import sys, time
from pathlib import Path

import torch
import allstep.torch as hvd

hvd.init()
model = torch.nn.Linear(1, 1, bias=False).double()
torch.nn.init.zeros_(model.weight)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=1.0), named_parameters=model.named_parameters()
)
state = hvd.elastic.TorchState(model, optimizer, steps=0)


@hvd.elastic.run
def train(state):
    while not hvd.broadcast_object(Path(sys.argv[1]).exists(), root_rank=0):
        time.sleep(0.05)
        optimizer.zero_grad()
        model(torch.full((1, 1), state.steps + 1.0, dtype=torch.float64)).sum().backward()
        optimizer.step()
        state.steps += 1
        state.commit()
        if hvd.rank() == 0:
            print("step", state.steps, hvd.size(), flush=True)


train(state)
assert model.weight.item() == -state.steps * (state.steps + 1) / 2, (model.weight, state.steps)
print("exact after", state.steps, "steps", flush=True)
hvd.shutdown()
"""


def last_of_script(output: Path) -> LastStep:
    """Return number and size of the last step that rank 0 has printed."""
    found = re.findall(r"\] step (\d+) (\d+)$", output.read_text(), re.MULTILINE)
    return LastStep(*map(int, found[-1])) if found else LastStep()


if SOAK:

    @pytest.mark.parametrize("kind", ["kill", "cut", "exit:3", "raise", "stop:0.5", "hang"])
    @pytest.mark.soak(1)
    def test_script(tmp_path: Path, kind: str) -> None:
        script, output, end = tmp_path / "train.py", tmp_path / "output", tmp_path / "end"
        script.write_text(SCRIPT)
        faults = faults_of_script(kind)
        launch = [*ALLSTEP, "run", "-np", "5", "--min-np", "1", *options(faults)]
        with started([*launch, sys.executable, str(script), str(end)], output, ENVIRONMENT) as run:
            wait_for_faults(run, output, faults)
            before = last_of_script(output).samples

            def is_whole() -> bool:
                assert run.poll() is None, output.read_text()
                step = last_of_script(output)
                return step.size == 5 and step.samples > before + 2

            wait_until(is_whole, 240, "a step of 5 workers after the faults")
            end.touch()
            assert run.wait(120) == 0, output.read_text()
        assert output.read_text().count("exact after") == 5, output.read_text()
        assert_nothing_left(tmp_path)
