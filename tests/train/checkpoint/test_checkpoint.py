"""Checkpoints: whole or absent, whatever happens; equal states are equal files; the state of every
optimizer is complete.
"""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from allstep.errors import CheckpointError
from allstep.train.checkpoint import write_and_read as checkpoint
from allstep.train.checkpoint.optimizer_state import flatten, restore
from allstep.train.checkpoint.write_and_read import Snapshot


def snapshot(samples: int = 100, seed: int = 0) -> Snapshot:
    torch.manual_seed(seed)
    weights = {
        "b.weight": torch.randn(3, 4),
        "a.bias": torch.randn(5, dtype=torch.float64),
        "n": torch.tensor(7),
    }
    optimizer = {"b.weight/momentum_buffer": torch.randn(3, 4).bfloat16()}
    return Snapshot(
        samples, weights, optimizer, {"position": samples, "best": 0.5, "groups": [{"lr": 0.1}]}
    )


def assert_same(found: Snapshot, expected: Snapshot) -> None:
    assert (found.samples, found.state) == (expected.samples, expected.state)
    for mine, theirs in ((found.weights, expected.weights), (found.optimizer, expected.optimizer)):
        assert mine.keys() == theirs.keys()
        for name in mine:
            assert mine[name].dtype == theirs[name].dtype and torch.equal(mine[name], theirs[name])


def test_there_and_back(tmp_path: Path) -> None:
    path = checkpoint.write(tmp_path / "c", snapshot())
    assert path.name == "000000000100"
    assert sorted(file.name for file in path.iterdir()) == [
        "manifest.json",
        "optimizer.safetensors",
        "state.json",
        "weights.safetensors",
    ]
    assert_same(checkpoint.read(path), snapshot())
    assert list(path.parent.iterdir()) == [path]


def test_equal_states_are_equal_files(tmp_path: Path) -> None:
    one = checkpoint.write(tmp_path / "one", snapshot())
    other = snapshot()
    turned = Snapshot(
        100,
        dict(reversed(other.weights.items())),
        other.optimizer,
        dict(reversed(other.state.items())),
    )
    two = checkpoint.write(tmp_path / "two", turned)
    for file in one.iterdir():
        assert file.read_bytes() == (two / file.name).read_bytes(), file.name


def test_tied_and_channels_last_weights(tmp_path: Path) -> None:
    image = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    shared = torch.randn(6)
    weights = {
        "a": shared,
        "b": shared,
        "part": shared[1:3],
        "turned": torch.randn(3, 4).T,
        "picture": image,
    }
    found = checkpoint.read(checkpoint.write(tmp_path, Snapshot(1, weights, {}, {})))
    assert all(torch.equal(found.weights[name], value) for name, value in weights.items())


def test_the_newest_counts_and_one_of_the_same_number_is_replaced(tmp_path: Path) -> None:
    for samples in (5, 1000, 20):
        checkpoint.write(tmp_path, snapshot(samples))
    assert [path.name for path in checkpoint.written(tmp_path)] == [
        "000000001000",
        "000000000020",
        "000000000005",
    ]
    checkpoint.write(tmp_path, snapshot(1000, seed=1))
    found = checkpoint.newest(tmp_path)
    assert found.snapshot is not None and found.complaints == ()
    assert_same(found.snapshot, snapshot(1000, seed=1))
    assert checkpoint.newest(tmp_path / "nowhere") == checkpoint.Newest(None, None, ())


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_damage_is_found_and_the_one_before_taken(tmp_path: Path, data: st.DataObject) -> None:
    folder = tmp_path / os.urandom(6).hex()
    checkpoint.write(folder, snapshot(10))
    path = checkpoint.write(folder, snapshot(20))
    file = data.draw(st.sampled_from(sorted(path.iterdir())))
    content = bytearray(file.read_bytes())
    kind = data.draw(st.sampled_from(["flip", "cut", "longer", "gone"]))
    place = data.draw(st.integers(0, len(content) - 1))
    if kind == "flip":
        content[place] ^= 1 << data.draw(st.integers(0, 7))
    elif kind == "cut":
        del content[place:]
    elif kind == "longer":
        content += b"x"
    if kind == "gone":
        file.unlink()
    else:
        file.write_bytes(content)
    if file.name == "manifest.json" and kind != "gone" and _means_the_same(content, path):
        return
    found = checkpoint.newest(folder)
    assert found.snapshot is not None and found.path is not None
    assert found.path.name == "000000000010"
    assert len(found.complaints) == 1 and str(path) in found.complaints[0]
    assert_same(found.snapshot, snapshot(10))


def _means_the_same(content: bytes, path: Path) -> bool:
    """A flipped bit in a manifest may only change white space, which does no harm."""
    try:
        found = json.loads(content)
    except ValueError:
        return False
    files = {name: {"nbytes": (path / name).stat().st_size} for name in checkpoint._HASHED}
    try:
        sizes = {name: {"nbytes": found["files"][name]["nbytes"]} for name in checkpoint._HASHED}
        right = checkpoint.checksums(path) == {
            name: checkpoint._hash((path / name).read_bytes()) for name in checkpoint._HASHED
        }
    except (KeyError, TypeError, CheckpointError):
        return False
    return bool(sizes == files and right and found["format"] == checkpoint.FORMAT)


def test_other_versions_and_things_that_are_no_checkpoints(tmp_path: Path) -> None:
    path = checkpoint.write(tmp_path, snapshot())
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**manifest, "format": 99}))
    with pytest.raises(CheckpointError, match="has format 99; this version reads 1"):
        checkpoint.read(path)
    with pytest.raises(CheckpointError, match="there is no such checkpoint"):
        checkpoint.read(tmp_path / "000000000007")


WRITER = """
import sys, torch
from pathlib import Path
from allstep.train.checkpoint import write_and_read as checkpoint
from allstep.train.checkpoint.write_and_read import Snapshot
folder = Path(sys.argv[1])
for samples in range(1, 10_000):
    weights = {f"w{i}": torch.full((20_000,), float(samples)) for i in range(5)}
    checkpoint.write(folder, Snapshot(samples, weights, {}, {"samples": samples}))
    print(samples, flush=True)
"""


@pytest.mark.usefixtures("processes")
def test_a_writer_that_is_killed(tmp_path: Path) -> None:
    """Checkpoints that it reported as written are whole; the unfinished one is absent and swept."""
    script = tmp_path / "writer.py"
    script.write_text(WRITER)
    folder = tmp_path / "checkpoints"
    for turn in range(3):
        with subprocess.Popen(
            [sys.executable, str(script), str(folder)], stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            for _ in range(3 + turn):
                last = int(process.stdout.readline())
            time.sleep(0.0007 * turn)
            process.send_signal(signal.SIGKILL)
            last = int(([last, *process.stdout.read().split()])[-1])
        found = checkpoint.newest(folder)
        assert found.snapshot is not None and found.complaints == ()
        assert found.snapshot.samples in (last, last + 1)
        for path in checkpoint.written(folder):
            values = checkpoint.read(path).weights
            assert all((value == float(int(path.name))).all() for value in values.values())
    checkpoint.write(folder, snapshot(20_000))
    assert [path for path in folder.iterdir() if path.name.startswith(".")] == []


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = checkpoint.write(tmp_path, snapshot(1))

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        checkpoint.write(tmp_path, snapshot(2))
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == [kept]


def test_removing(tmp_path: Path) -> None:
    one, two = (checkpoint.write(tmp_path, snapshot(samples)) for samples in (1, 2))
    checkpoint.remove(one)
    checkpoint.remove(one)
    assert list(tmp_path.iterdir()) == [two]


OPTIMIZERS: list[Callable[[Any], torch.optim.Optimizer]] = [
    lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
    lambda p: torch.optim.Adam(p, 0.01, betas=(0.8, 0.99), amsgrad=True),
    lambda p: torch.optim.AdamW(p, torch.tensor(0.01)),
    lambda p: torch.optim.Adagrad(p, 0.1),
    lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.5, centered=True),
    lambda p: torch.optim.Rprop(p, 0.01),
    lambda p: torch.optim.NAdam(p, 0.01),
    lambda p: torch.optim.LBFGS(p, 0.1),
]


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_every_optimizer_resumes_as_if_never_interrupted(
    make: Callable[[Any], torch.optim.Optimizer], tmp_path: Path
) -> None:
    def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            x = torch.randn(8, 3, generator=torch.Generator().manual_seed(step))

            def closure() -> torch.Tensor:
                optimizer.zero_grad()
                loss: torch.Tensor = model(x).square().mean()  # noqa: B023
                loss.backward()
                return loss

            optimizer.step(closure)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = make(model.parameters())
    names = [name for name, _ in model.named_parameters()]
    train(model, optimizer, range(5))
    if isinstance(optimizer, torch.optim.LBFGS):  # keeps lists of tensors
        with pytest.raises(CheckpointError, match=r"0.weight/|keeps a"):
            flatten(optimizer.state_dict(), names)
        return
    tensors, numbers = flatten(optimizer.state_dict(), names)
    path = checkpoint.write(
        tmp_path, Snapshot(5, model.state_dict(), tensors, {"optimizer": numbers})
    )
    train(model, optimizer, range(5, 10))

    found = checkpoint.read(path)
    again = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    other = make(again.parameters())
    again.load_state_dict(dict(found.weights))
    other.load_state_dict(restore(found.optimizer, found.state["optimizer"], names))
    train(again, other, range(5, 10))
    for mine, theirs in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_state_of_other_parameters() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    tensors, numbers = flatten(optimizer.state_dict(), ["weight", "bias"])
    with pytest.raises(
        CheckpointError, match=r"only the checkpoint has bias; only the model has gain"
    ):
        restore(tensors, numbers, ["weight", "gain"])
    with pytest.raises(CheckpointError, match="in another order"):
        restore(tensors, numbers, ["bias", "weight"])
