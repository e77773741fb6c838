"""An elastic training whose workers are killed at random: no bit and no sample is lost."""

import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from allstep import runlog
from conftest import SOAK
from support import counted_train
from support.counted_samples import assert_each_counts_once, counted_steps, links_of
from support.elastic_training import (
    OVERRIDES,
    assert_same_checkpoint,
    command,
    last_checkpoint,
    last_step,
    long_chain,
    started,
    stop,
    wait_for_step,
    workers_of,
)
from support.ranks import Ranks

pytestmark = pytest.mark.usefixtures("processes")

# Kills, and settings of the run.
PLANS: list[tuple[int, list[str]]] = (
    [(200, []), (20, ["share_weights=true"])] if SOAK else [(3, [])]
)
EPOCHS = "epochs=2000"
# Samples of a global batch, as in OVERRIDES.
BATCH = 50


def kill_some(workers: Callable[[], list[psutil.Process]], draws: random.Random, most: int) -> int:
    """Kill one worker, sometimes two at once; return how many.

    Rank 0 may be hit, too. A slot whose workers finish no step is given up, so the newest worker,
    which may wait as a spare, is left alone.
    """
    oldest = sorted(workers(), key=psutil.Process.create_time)[:-1]
    victims = draws.sample(oldest, 2 if most > 1 and draws.random() < 0.1 else 1)
    for victim in victims:
        victim.kill()
    return len(victims)


def assert_recorded(run: Path, positions: list[int], kills: int) -> None:
    """The record has the steps in order and none twice.

    It may lack the steps after whose update rank 0 died: at most one for each kill.
    """
    recorded = [step["samples"] for step in runlog.read(run / "run.jsonl").steps]
    assert recorded == sorted(set(recorded)) and recorded[-1] == positions[-1]
    assert set(recorded) <= set(positions) and len(recorded) >= len(positions) - kills


@pytest.mark.soak(1)  # its count is in the test
@pytest.mark.timeout(3600 if SOAK else 300)
@pytest.mark.parametrize(("kills", "more"), PLANS)
def test_random_kills(ranks: Ranks, tmp_path: Path, kills: int, more: list[str]) -> None:
    """A spare replaces each worker at once. The final files are those of a run that was restored at
    each of these positions, and each sample was trained exactly once in each epoch. With shared
    weights (in `make soak`) a worker may be killed at any point of its update."""
    run, output, draws = tmp_path / "run", tmp_path / "output", random.Random(17)
    program = [sys.executable, counted_train.__file__]
    arguments = command(run, EPOCHS, *more, "--spares", "1", workers=3, program=program)
    # The pause leaves fewer steps for the reference to repeat.
    env = {"COUNTED_SAMPLES": str(tmp_path), "COUNTED_PAUSE": "0.03"}
    with started(arguments, output, env) as training:
        position = num_killed = 0
        while num_killed < kills:
            position = wait_for_step(training, run, output, 3, beyond=position)
            time.sleep(0.3 * draws.random())
            num_killed += kill_some(lambda: workers_of(training), draws, kills - num_killed)
            # Steps before the kill, of which the record may lack the last one, do not show that a
            # replacement has come.
            position = last_step(run).samples + 2 * BATCH
        wait_for_step(training, run, output, 3, beyond=position)
        stop(training, output)
    steps = counted_steps(tmp_path, int(last_checkpoint(run).name))
    assert_each_counts_once(steps)
    assert_recorded(run, [step.position + len(step.samples) for step in steps], kills)
    reference, parts = tmp_path / "reference", links_of(steps, run)
    assert len(parts) > kills / 2
    long_chain(ranks, [*OVERRIDES, EPOCHS, *more], reference, parts, timeout=1500)
    assert_same_checkpoint(run, reference)
