"""dist_sync: the bits of one process that adds the workers' gradients in rank order."""

import os
import random
import re
import signal
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import allstep.kvstore
from allstep.errors import CollectiveTimeout, PeerLost
from allstep.optim import LARS
from support.ranks import Ranks

STEPS = 4
SHAPES = {"large": (3, 100_000), "matrix": (7, 5), "bias": (11,)}
OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.2, "weight_decay": 0.01}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
    "lars": (LARS, {"lr": 0.1, "momentum": 0.9}),
}


def gradient(rank: int, step: int, key: str, dtype: torch.dtype) -> Tensor:
    draws = torch.Generator().manual_seed(1000 * step + 10 * rank + len(key))
    return torch.randn(SHAPES[key], generator=draws, dtype=torch.float64).to(dtype)


def in_one_process(kind: str, num_workers: int, dtype: torch.dtype) -> dict[str, list[Tensor]]:
    """The values after each step: torch's optimizer on the sum in rank order."""
    cls, settings = OPTIMIZERS[kind]
    parameters = {key: nn.Parameter(gradient(99, 0, key, dtype)) for key in SHAPES}
    optimizer: torch.optim.Optimizer = cls(parameters.values(), **settings)
    found: dict[str, list[Tensor]] = {key: [] for key in SHAPES}
    for step in range(STEPS):
        for key, parameter in parameters.items():
            parameter.grad = gradient(0, step, key, dtype)
            for rank in range(1, num_workers):
                parameter.grad += gradient(rank, step, key, dtype)
        optimizer.step()
        for key, parameter in parameters.items():
            found[key].append(parameter.detach().clone())
    return found


@pytest.mark.parametrize(
    ("kind", "num_workers", "dtype"),
    [
        ("sgd", 2, torch.float32),
        ("sgd", 3, torch.float64),
        ("adamw", 3, torch.float32),
        ("adamw", 2, torch.float64),
        ("adagrad", 2, torch.float32),
        ("lars", 3, torch.float32),
    ],
)
def test_the_same_bits_as_one_process(
    ranks: Ranks, kind: str, num_workers: int, dtype: torch.dtype
) -> None:
    def work() -> None:
        torch.set_num_threads(1)
        expected = in_one_process(kind, num_workers, dtype)
        cls, settings = OPTIMIZERS[kind]
        with allstep.kvstore.create("dist_sync") as kv:
            draws = random.Random(kv.rank)
            keys = list(SHAPES)
            kv.init(keys, [gradient(99, 0, key, dtype) for key in keys])
            kv.set_optimizer(cls, **settings)
            outs = [torch.empty(SHAPES[key], dtype=dtype) for key in keys]
            for step in range(STEPS):
                gradients = [gradient(kv.rank, step, key, dtype) for key in keys]
                # The workers arrive in any order.
                time.sleep(draws.random() * 0.01)
                if step % 2:
                    kv.pushpull(keys, gradients, out=outs)
                else:
                    kv.push(keys, gradients)
                    kv.pull(keys, out=outs)
                for key, out in zip(keys, outs, strict=True):
                    assert torch.equal(out, expected[key][step]), (key, step)

    ranks(num_workers, work)


@pytest.mark.parametrize("how", ["killed", "closed"])
def test_a_lost_worker_ends_the_rounds(ranks: Ranks, how: str) -> None:
    def work() -> tuple[str, Any]:
        kv = allstep.kvstore.create("dist_sync")
        kv.init(3, torch.zeros(4))
        out = torch.empty(4)
        kv.pushpull(3, torch.ones(4), out=out)
        if kv.rank == 1:
            if how == "closed":
                kv.close()
                return "", None
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PeerLost) as caught:
            kv.pushpull(3, torch.ones(4), out=out)
        for again in (lambda: kv.pull(3, out=out), kv.barrier):
            with pytest.raises(PeerLost):
                again()
        return str(caught.value), caught.value.peer

    first, second = ranks.outcomes(2, work)
    text, peer = first.result
    why = "process exited" if how == "killed" else "has closed its store"
    assert text.startswith(f"pull of key 3: lost rank 1 ({why}); rank 0 waited "), text
    assert peer == 1 and second.exit_code == (-signal.SIGKILL if how == "killed" else 0)


def test_a_worker_that_does_not_push_is_reported_then_an_error(ranks: Ranks) -> None:
    def work() -> str:
        kv: Any = allstep.kvstore.create("dist_sync")
        kv.init("w", torch.zeros(4))
        text = ""
        if kv.rank == 0:
            parties = kv._values.parties
            usual = parties.limits
            parties.limits = usual._replace(stall=0.3, timeout=1.2)
            kv.push("w", torch.ones(4))
            with pytest.raises(CollectiveTimeout) as caught:
                kv.pull("w", out=torch.empty(4))
            parties.limits, text = usual, str(caught.value)
        kv.barrier()
        return text

    first, second = ranks.outcomes(2, work)
    assert (first.exit_code, second.exit_code) == (0, 0), first.output + second.output
    assert first.output.count("allstep: pull of key 'w': rank 0 has waited ") == 1
    assert re.match(r"pull of key 'w': rank 0 waited \d+\.\d s for rank 1", first.result)
