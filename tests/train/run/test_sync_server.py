"""`sync=server` has the bits of `allreduce` and of `share_weights`."""

from pathlib import Path
from typing import Any

import pytest
import torch

import allstep
from allstep.errors import ConfigError
from allstep.train import read_config
from allstep.train.checkpoint import write_and_read as checkpoint
from allstep.train.config.check_config import check_config
from allstep.train.config.check_sync import check_hosts
from allstep.train.run.loop import train
from allstep.world import World

# A batch of 51 leaves shares of 26 and 25 samples, and a short last batch.
SHORT = ["precision=float32", "epochs=1", "data.validation=50", "batch=51", "save.seconds=null"]
MODES = (["sync=allreduce"], ["sync=allreduce", "share_weights=true"], ["sync=server"])


def last_checkpoints(overrides: list[str]) -> list[checkpoint.Snapshot]:
    """Train in each mode; return the last checkpoints."""
    world, found = allstep.init(), []
    for number, mode in enumerate(MODES):
        out = Path.cwd() / str(number)
        train(read_config("digits", [*SHORT, *overrides, *mode]), world, out)
        if world.rank == 0:
            found.append(checkpoint.read(checkpoint.written(out / "checkpoints")[0]))
    return found


@pytest.mark.parametrize(
    "overrides", [["optimizer.momentum=0.9"], ["optimizer=lars", "optimizer.lr=1"]]
)
def test_a_server_has_the_bits_of_allreduce(ranks: Any, overrides: list[str]) -> None:
    allreduce, shared, server = ranks(2, last_checkpoints, overrides)[0]
    for other in (shared, server):
        assert other.state == allreduce.state
        for name, tensor in [*allreduce.weights.items(), *allreduce.optimizer.items()]:
            assert torch.equal((other.weights | other.optimizer)[name], tensor), name


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["sync=server", "share_weights=false"], "sync=server and share_weights=false exclude"),
        (["sync=server", "precision=float16"], "sync=server and precision=float16 exclude"),
        (["sync=server", "sync.correct=delay"], "sync.correct=delay corrects stale gradients"),
        (["sync=server", "sync.scale=false"], "sync.scale=false is for pushes of a share"),
    ],
)
def test_what_does_not_fit_is_an_error(overrides: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        check_config(read_config("digits", overrides), 2)


def test_several_hosts_are_not_supported_yet() -> None:
    world = World(0, 4, 0, 2, 0, 2, "h1", "allstep")
    check_hosts(read_config("digits", []), world)
    with pytest.raises(ConfigError, match="on one host only so far, and this one has 2 of the 4"):
        check_hosts(read_config("digits", ["sync=server"]), world)
