"""The path of a gradient on one host: few packages, in one direction.

A profiler looks at the call stack of every Python call during a training step and reduces it to the
packages of allstep on it, the caller first. A package that occurs twice means that a lower layer
calls back into a higher one, which makes the path hard to follow.
"""

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import allstep
import allstep.torch as hvd
from allstep.train import Callback, Progress, read_config, train
from support.ranks import Ranks

MAX_PACKAGES = 5
Packages = tuple[str, ...]


def packages_of(frame: FrameType | None) -> Packages:
    """Return the packages of allstep on the stack of `frame`, the caller first, neighbors merged."""
    found: list[str] = []
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        package = name.split(".")[1] if name.startswith("allstep.") else ""
        if package and (not found or found[-1] != package):
            found.append(package)
        frame = frame.f_back
    return tuple(reversed(found))


class Paths:
    """Records the paths of all Python calls in this thread, from `start` to `stop`."""

    def __init__(self) -> None:
        self.found: set[Packages] = set()

    def start(self) -> None:
        sys.setprofile(self._note)

    def stop(self) -> set[Packages]:
        """Return the paths that pass the exchange."""
        sys.setprofile(None)
        return {path for path in self.found if "parallel" in path}

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            self.found.add(packages_of(frame))


class FromSecondStep(Callback):
    """Starts to record after the first step, which opens process groups and shared memory."""

    def __init__(self, paths: Paths) -> None:
        self.paths = paths

    def progress(self, progress: Progress) -> None:
        self.paths.start()


def too_long(paths: set[Packages]) -> list[Packages]:
    """Return the paths with too many packages, or with one that comes twice."""
    return sorted(path for path in paths if len(path) > MAX_PACKAGES or len(set(path)) < len(path))


def by_train(share_weights: bool) -> set[Packages]:
    world = allstep.init()
    options = ["epochs=1", "batch=400", "data.validation=100", "save.seconds=null", "log_every=1"]
    config = read_config("digits", [*options, f"share_weights={str(share_weights).lower()}"])
    paths = Paths()
    with tempfile.TemporaryDirectory() as out:
        train(config, world, Path(out) / str(world.rank), [FromSecondStep(paths)])
        return paths.stop()


def by_front_end() -> set[Packages]:
    hvd.init()
    model = nn.Linear(20, 3)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1), model.named_parameters()
    )
    paths = Paths()
    for number in range(4):
        if number == 1:
            paths.start()
        optimizer.zero_grad()
        model(torch.ones(4, 20)).sum().backward()
        optimizer.step()
    return paths.stop()


def test_a_gradient_of_train_passes_few_packages_each_once(ranks: Ranks) -> None:
    for paths in ranks(2, by_train, False):
        assert any(path[-2:] == ("parallel", "comm") for path in paths)
        assert "\n".join(" -> ".join(path) for path in too_long(paths)) == ""


@pytest.mark.parametrize(
    ("work", "arguments"), [(by_train, (True,)), (by_front_end, ())], ids=["shared", "front-end"]
)
def test_other_ways_pass_few_packages(
    ranks: Ranks, work: Callable[..., set[Packages]], arguments: tuple[Any, ...]
) -> None:
    """With shared weights, the collective calls the owner's update; a front-end is a subclass."""
    for paths in ranks(2, work, *arguments):
        assert any("parallel" in path and "comm" in path for path in paths)
        assert max(len(set(path)) for path in paths) <= MAX_PACKAGES


def test_a_path_that_comes_back_is_found() -> None:
    assert too_long({("train", "parallel", "comm"), ("train", "parallel", "train")}) == [
        ("train", "parallel", "train")
    ]
    assert too_long({("cli", "train", "torch", "hvd", "parallel", "comm")})
