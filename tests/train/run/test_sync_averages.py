"""`sync=local` and `sync=diloco` in `allstep train`: equal ranks, and a resume to the same bits."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

import allstep
from allstep.errors import ConfigError
from allstep.train import read_config
from allstep.train.checkpoint import write_and_read as checkpoint
from allstep.train.checkpoint.broadcast import broadcast_snapshot
from allstep.train.config.check_config import check_config
from allstep.train.run.loop import train
from support.elastic_training import ALLSTEP, ENVIRONMENT

# A batch of 51 leaves shares of 26 and 25 samples, and a short last batch. 1,300 samples are 25
# updates and a short one, so rounds of 4 end early at the end of an epoch.
SHORT = ["precision=float32", "epochs=2", "data.validation=137", "batch=51", "save.seconds=null"]
SHORT += ["save.epochs=1", "save.keep=9"]


def train_and_resume(overrides: list[str]) -> Any:
    """Train; then resume from the first checkpoint. Return what both have at the end."""
    world, out = allstep.init(), Path.cwd() / "run"
    config = read_config("digits", [*SHORT, *overrides])
    result: Any = train(config, world, out)
    written = sorted(checkpoint.written(out / "checkpoints"))
    whole = checkpoint.read(written[-1])
    middle = checkpoint.read(written[0]) if world.rank == 0 else None
    train(config, world, Path.cwd() / "again", snapshot=broadcast_snapshot(world, middle))
    resumed = checkpoint.written(Path.cwd() / "again" / "checkpoints")
    if world.rank:
        return None
    return result.test.accuracy, whole, checkpoint.read(resumed[0]), middle, str(written[0])


def check_equal(whole: Any, resumed: Any) -> None:
    assert resumed.samples == whole.samples
    for name, tensor in [*whole.weights.items(), *whole.optimizer.items()]:
        assert torch.equal((resumed.weights | resumed.optimizer)[name], tensor), name
    assert resumed.state == whole.state


@pytest.mark.parametrize(
    "overrides",
    [
        ["sync=local:4", "model.norm=batch"],
        ["sync=diloco:4", "optimizer=adamw", "optimizer.lr=0.002"],
        ["sync=local:4:1", "ema.decay=0.9"],
    ],
    ids=["local", "diloco", "from an epoch"],
)
def test_a_resumed_run_has_the_same_bits(ranks: Any, overrides: list[str]) -> None:
    accuracy, whole, resumed, middle, folder = ranks(2, train_and_resume, overrides)[0]
    assert middle.samples < whole.samples
    check_equal(whole, resumed)
    assert any("/party.1." in name for name in whole.optimizer)
    assert any("outer_momentum" in name for name in whole.optimizer) == ("diloco" in overrides[0])
    assert accuracy > 0.5
    if overrides[0] == "sync=diloco:4":
        assert ranks(3, resume, overrides, folder)[0] > 0.5


def resume(overrides: list[str], folder: str) -> float | None:
    """Resume with another number of workers; return the test accuracy."""
    world = allstep.init()
    snapshot = checkpoint.read(Path(folder)) if world.rank == 0 else None
    config, out = read_config("digits", [*SHORT, *overrides]), Path.cwd() / "other"
    result: Any = train(config, world, out, snapshot=broadcast_snapshot(world, snapshot))
    return float(result.test.accuracy) if world.rank == 0 else None


@pytest.mark.usefixtures("processes")
def test_a_dead_worker_does_not_stop_the_run(tmp_path: Path) -> None:
    """Its round is undone and repeated by the others; no sample is lost."""
    overrides = ["digits", "sync=diloco:4", "epochs=2", "precision=float32", "execution=plain"]
    options = ["--workers", "3", "--out", str(tmp_path / "run"), "--fault", "kill@rank=0,step=10"]
    done = subprocess.run(
        [*ALLSTEP, "train", *overrides, *options],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "lost rank 0" in done.stdout
    assert "2 workers continue from sample 512" in done.stdout
    assert "0 samples lost" in done.stdout


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["sync=local:8", "share_weights=true"], "share_weights=true and sync=local:8 exclude"),
        (["sync=local:8", "precision=float16"], "precision=float16 and sync=local:8 exclude"),
        (["sync=local:8", "model.norm=sync"], "model.norm=sync and sync=local:8 exclude"),
        (["sync=local:8", "noise_scale=true"], "the noise scale and sync=local:8 exclude"),
        (["sync=local:8:9", "epochs=9"], "averages from epoch 9 on, and the run has 9"),
        (["sync=local:8", "sync.outer_lr=0.7"], "sync.outer_lr is for the outer step of DiLoCo"),
        (["sync=diloco:8", "sync.correct=lr"], "sync.correct=lr corrects stale gradients"),
    ],
)
def test_what_does_not_fit_is_an_error(overrides: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        check_config(read_config("digits", overrides), 2)


def last_checkpoint(overrides: list[str]) -> Any:
    world, out = allstep.init(), Path.cwd() / "run"
    train(read_config("digits", [*SHORT, "epochs=1", *overrides]), world, out)
    written = sorted(checkpoint.written(out / "checkpoints"))
    return None if world.rank else checkpoint.read(written[-1])


def test_hosts_are_the_parties_of_several_hosts(ranks: Any) -> None:
    """Two hosts with 2 and 1 workers train as two workers with batches of two thirds and one.

    Reference: the same parties as 2 workers with these shares, each with a host of its own. Sums
    within a host round otherwise, so values are close and not equal. Workers that were parties
    would have momenta of their own, which differ.
    """
    overrides = ["sync=local:4", "batch=51", "optimizer.momentum=0.9", "model.norm=none"]
    found = ranks(3, last_checkpoint, overrides, hosts=list("aab"))[0]
    shares = ["shares=[2,1]", "sync.parties=workers"]
    expected = ranks(2, last_checkpoint, [*overrides, *shares], hosts=list("ab"))[0]
    for name, tensor in expected.weights.items():
        torch.testing.assert_close(found.weights[name], tensor, rtol=1e-4, atol=1e-4)
    momenta = {name: each for name, each in found.optimizer.items() if "/party." in name}
    for name, tensor in momenta.items():
        if "/party.1." in name:
            # Workers of a host have one state.
            assert torch.equal(tensor, found.optimizer[name.replace("party.1.", "")]), name
    assert momenta
