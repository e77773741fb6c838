"""A config must fit every number of workers that an elastic run may have, under any launcher."""

import os
from types import SimpleNamespace

import pytest

from allstep.comm.join.membership import Membership
from allstep.errors import ConfigError
from allstep.train.run import worker
from allstep.train.run.duties import Duties
from allstep.train.run.train_request import TrainRequest
from allstep.wire.keys import SIZES
from allstep.world import World

GHOST = ["model.norm=ghost", "model.ghost=16", "batch=48"]


def test_it_is_checked_for_the_sizes_that_the_launcher_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`allstep run --min-np 2 -np 3 allstep train`: 16 divides 48 / 3, but not 48 / 2."""
    monkeypatch.setattr(worker, "membership", lambda: SimpleNamespace(sizes=range(2, 4)))
    world = World(0, 3, 0, 3, 0, 1, "h", "allstep")
    asked = TrainRequest("digits", GHOST, None, None, False, False, None)
    with pytest.raises(ConfigError, match=r"16 does not divide the 24 samples.*--min-np and --max"):
        worker._decide(asked, world, Duties())


@pytest.mark.parametrize(("text", "sizes"), [("2:4", [2, 3, 4]), ("", []), ("2:", []), ("x", [])])
def test_a_worker_reads_them_from_its_environment(
    monkeypatch: pytest.MonkeyPatch, text: str, sizes: list[int]
) -> None:
    monkeypatch.setitem(os.environ, SIZES, text)
    assert list(Membership("3-secret").sizes) == sizes
