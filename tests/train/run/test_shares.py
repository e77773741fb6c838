"""Shares of a run, a slow worker that gets a smaller one, and the line that names it."""

from collections.abc import Sequence
from pathlib import Path

import pytest

import allstep
from allstep import runlog
from allstep.report.stragglers import find
from allstep.train import read_config
from allstep.train.checkpoint import write_and_read as checkpoint
from allstep.train.run.loop import train
from allstep.train.watch import straggler_report
from allstep.train.watch.record_callback import Record
from allstep.train.watch.straggler_watch import StragglerWatch
from support.ranks import Ranks

OVERRIDES = ["batch=64", "precision=float64", "save.seconds=null", "log_every=5"]
# In the environment of the ranks, as `--fault` puts it there.
SLOW = {"ALLSTEP_FAULTS": "slow:4@rank=1"}


class SoonWatch(StragglerWatch):
    """Finds a straggler after 25 steps instead of half a minute."""

    def __init__(self, hosts: Sequence[str]) -> None:
        super().__init__(hosts, min_intervals=5, min_seconds=0.0)


def run(out: Path, overrides: list[str]) -> None:
    """Train a run, or resume the one in `out`."""
    straggler_report.StragglerWatch = SoonWatch  # type: ignore[misc]
    world = allstep.init()
    callbacks = [Record(runlog.RunLog(out / "run.jsonl"))] if world.rank == 0 else []
    config = read_config("digits", [*OVERRIDES, *overrides])
    snapshot = checkpoint.newest(out / "checkpoints").snapshot
    train(config, world, out, callbacks, snapshot=snapshot)


def losses(out: Path) -> list[float]:
    return [line["loss"] for line in runlog.read(out / "run.jsonl").evals]


def changes(out: Path) -> list[tuple[int, list[int]]]:
    """Return position and weights of each change of the shares."""
    events = runlog.read(out / "run.jsonl").events
    return [(line["samples"], line["shares"]) for line in events if "shares" in line]


def test_a_slow_worker_gets_fewer_samples_and_the_losses_stay_the_same(
    ranks: Ranks, tmp_path: Path
) -> None:
    """Reference: the same run with even shares, where the slow worker holds up the other."""
    by_speed, even = tmp_path / "speed", tmp_path / "even"
    for out in (by_speed, even):
        out.mkdir()
    ranks(2, run, by_speed, ["shares=speed", "epochs=6"], env=SLOW)
    ranks(2, run, even, ["epochs=6"], env=SLOW)
    assert losses(by_speed) == pytest.approx(losses(even), rel=1e-8)
    assert changes(even) == []
    found = changes(by_speed)
    assert all(sum(weights) == 64 for _, weights in found)
    assert found[-1][1][1] < 22, found
    # 21 batches of an epoch: a decision comes after every 20 updates.
    assert found[0][0] == 20 * 64

    # Only the slow worker's own work shows who is slow.
    events = runlog.read(even / "run.jsonl").events
    slow = [line["straggler"] for line in events if "straggler" in line]
    assert ([1], "compute") in [(each["ranks"], each["part"]) for each in slow], slow
    assert any(line["text"].startswith("worker 1 is ") for line in events)
    found_again = find(runlog.timed(runlog.read(even / "run.jsonl")))
    assert "worker 1" in [each.name for each in found_again]

    # A resumed run starts with even shares: the first change is at most a fifth.
    ranks(2, run, by_speed, ["shares=speed", "epochs=8"], env=SLOW)
    resumed = changes(by_speed)[len(found) :]
    assert resumed[0][0] > 6 * 1294 and resumed[0][1][1] >= 25, resumed


def test_fixed_shares_are_reproducible(ranks: Ranks, tmp_path: Path) -> None:
    """The files of two runs are equal; a run with even shares differs by rounding."""
    places = [tmp_path / name for name in ("first", "second", "even")]
    for out in places:
        out.mkdir()
        shares = "even" if out.name == "even" else "[3, 1]"
        ranks(2, run, out, [f"shares={shares}", "epochs=1", "accumulation=2"])
    first, second, even = places
    assert losses(first) == losses(second) == pytest.approx(losses(even), rel=1e-9)
    assert changes(first) == []
    files = [sorted((out / "checkpoints").rglob("*.safetensors")) for out in places]
    assert len(files[0]) >= 2
    contents = [[path.read_bytes() for path in found] for found in files]
    assert contents[0] == contents[1] != contents[2]
