"""States of optimizers in files: whole values, for any number of workers and any store."""

from pathlib import Path
from typing import Any

import pytest
import torch

import allstep.kvstore
from allstep.errors import CheckpointError
from allstep.optim import LAMB
from support.ranks import Ranks

SHAPES = {"large": (3, 100_000), "small": (4,), "unused": (2,)}
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "multi_precision": True}),
    "lamb": (LAMB, {"lr": 0.01}),
}


def store(name: str, kind: str) -> allstep.kvstore.KVStore:
    kv = allstep.kvstore.create(name)
    types = {"small": torch.bfloat16}
    values = {key: torch.ones(shape, dtype=types.get(key)) for key, shape in SHAPES.items()}
    kv.init(list(values), list(values.values()))
    cls, settings = OPTIMIZERS[kind]
    kv.set_optimizer(cls, **settings)
    return kv


def push(kv: allstep.kvstore.KVStore, step: int) -> None:
    draws = torch.Generator().manual_seed(step)
    for key in ("large", "small"):
        gradient = torch.randn(SHAPES[key], generator=draws)
        out = torch.empty(SHAPES[key], dtype=torch.bfloat16 if key == "small" else None)
        kv.pushpull(key, gradient.to(out.dtype), out=out)


def values(kv: allstep.kvstore.KVStore) -> list[torch.Tensor]:
    outs = [
        torch.empty(shape, dtype=torch.bfloat16 if key == "small" else None)
        for key, shape in SHAPES.items()
    ]
    kv.pull(list(SHAPES), out=outs)
    return outs


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_state_continues_in_another_store(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    """Saved by one worker of two, loaded by a local store and by two others: the same bits."""
    path = tmp_path / "states.safetensors"

    def begin() -> list[torch.Tensor]:
        torch.set_num_threads(1)
        kv = store("dist_async", kind)
        if kv.rank == 0:
            push(kv, 1)
            push(kv, 2)
            kv.save_optimizer_states(path)
            kv.save_optimizer_states(f"{path}.again")
            push(kv, 3)
        kv.barrier()
        return values(kv)

    def go_further(name: str) -> list[torch.Tensor]:
        torch.set_num_threads(1)
        kv = store(name, kind)
        # The weights are not in the file; two steps make them, and another state.
        if kv.rank == 0:
            push(kv, 1)
            push(kv, 2)
        kv.load_optimizer_states(path)
        if kv.rank == 0:
            push(kv, 3)
        kv.barrier()
        return values(kv)

    expected, _ = ranks(2, begin)
    assert path.read_bytes() == Path(f"{path}.again").read_bytes()
    for found in (*ranks(2, go_further, "dist_async"), *ranks(1, go_further, "local")):
        assert all(map(torch.equal, found, expected))


def test_a_state_without_steps_is_absent(tmp_path: Path) -> None:
    kv = store("local", "sgd")
    kv.save_optimizer_states(tmp_path / "empty")
    kv.load_optimizer_states(str(tmp_path / "empty"))
    push(kv, 1)
    kv.save_optimizer_states(tmp_path / "two keys", dump_optimizer=True)
    other = store("local", "sgd")
    other.load_optimizer_states(tmp_path / "two keys")
    states = {key: [each.has_state for each in k.slices] for key, k in other._values.keys.items()}
    assert states == {"large": [True] * 2, "small": [True], "unused": [False]}


@pytest.mark.parametrize("name", ["local", "dist_sync"])
def test_a_state_of_another_store_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "states"
    with store("local", "sgd") as kv:
        push(kv, 1)
        kv.save_optimizer_states(path)
    with (
        store(name, "adamw") as kv,
        pytest.raises(
            CheckpointError, match=r"state of torch\.optim\.sgd\.SGD, but this store has"
        ),
    ):
        kv.load_optimizer_states(path)
    for shape, text in (
        ((5,), "'momentum_buffer' of key 'small' is .* of 4, expected"),
        (None, "does not have"),
    ):
        with allstep.kvstore.create(name) as kv:
            kv.init("large", torch.ones(3, 100_000))
            if shape is not None:
                kv.init("small", torch.ones(shape, dtype=torch.bfloat16))
            kv.set_optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
            with pytest.raises(CheckpointError, match=text):
                kv.load_optimizer_states(path)
