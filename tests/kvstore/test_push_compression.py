"""Compressed pushes: each worker's residual, MXNet's meaning, and what is refused."""

from typing import Any

import pytest
import torch
from torch import Tensor

import allstep.kvstore
from allstep.errors import UserError
from support.ranks import Ranks

SHAPE = (3, 100_000)
STEPS = 5


def gradient(rank: int, step: int) -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(10 * rank + step))


def sent_2bit(total: Tensor, threshold: float) -> Tensor:
    """What MXNet sends of `total`, from which it is subtracted."""
    sent = torch.where(
        total >= threshold, threshold, torch.where(total <= -threshold, -threshold, 0)
    )
    total -= sent
    return sent


def expected(num_workers: int, threshold: float) -> list[Tensor]:
    """The weights of `dist_sync` with SGD after each step, in one process."""
    weights, residuals = torch.zeros(SHAPE), [torch.zeros(SHAPE) for _ in range(num_workers)]
    found = []
    for step in range(STEPS):
        parts = []
        for rank, residual in enumerate(residuals):
            residual += gradient(rank, step)
            parts.append(sent_2bit(residual, threshold))
        weights = weights.sub(sum(parts[1:], parts[0]), alpha=0.5)
        found.append(weights)
    return found


@pytest.mark.parametrize("num_workers", [1, 2])
def test_sync_pushes_have_mxnets_meaning(ranks: Ranks, num_workers: int) -> None:
    def work() -> None:
        with allstep.kvstore.create("dist_sync") as kv:
            kv.set_gradient_compression({"type": "2bit", "threshold": 0.75})
            kv.init("w", torch.zeros(SHAPE))
            kv.set_optimizer(torch.optim.SGD, lr=0.5)
            out = torch.empty(SHAPE)
            for step, weights in enumerate(expected(num_workers, 0.75)):
                if step % 2:
                    kv.pushpull("w", gradient(kv.rank, step), out=out)
                else:
                    kv.push("w", gradient(kv.rank, step))
                    kv.pull("w", out=out)
                assert torch.equal(out, weights)

    ranks(num_workers, work)


def test_async_pushes_keep_residuals_by_key() -> None:
    """The default threshold is MXNet's, `init` is whole, and the values of devices are added."""
    with allstep.kvstore.create("dist_async") as kv:
        kv.init(["a", "b"], [torch.full((4,), 0.3), torch.zeros(4)])
        kv.set_gradient_compression({"type": "2bit"})
        kv.set_optimizer(torch.optim.SGD, lr=1.0)
        out = torch.empty(4)
        for value in (0.0, 0.5):
            kv.push(["a", "b"], [[torch.full((4,), 0.2)] * 2, torch.full((4,), -0.1)])
            kv.pull("a", out=out)
            assert torch.allclose(out, torch.full((4,), 0.3 - value))
            kv.pull("b", out=out)
            assert not out.any()


@pytest.mark.parametrize("kind", ["fp16", "bf16", "int8", "1bit", "topk:5%", "powersgd:2"])
def test_other_codecs_lose_nothing(kind: str) -> None:
    """Weights and residual together are the sum of the gradients."""
    with allstep.kvstore.create("dist_async") as kv:
        kv.set_gradient_compression({"type": kind})
        kv.init("w", torch.zeros(40, 50))
        kv.set_optimizer(torch.optim.SGD, lr=1.0)
        gradients = [gradient(0, step)[0, :2000].view(40, 50) for step in range(STEPS)]
        for each in gradients:
            kv.push("w", each)
        out = torch.empty(40, 50)
        kv.pull("w", out=out)
        feedback: Any = kv._compression._feedback["w"]
        torch.testing.assert_close(
            feedback.residual.view(40, 50) - out, sum(gradients), atol=1e-4, rtol=1e-4
        )


@pytest.mark.parametrize("name", ["local", "device"])
def test_local_stores_send_nothing(name: str) -> None:
    with (
        allstep.kvstore.create(name) as kv,
        pytest.raises(UserError, match=f"a '{name}' store sends nothing .*; remove the call, or"),
    ):
        kv.set_gradient_compression({"type": "2bit"})


def test_after_the_first_push_it_is_late() -> None:
    with allstep.kvstore.create("dist_sync") as kv:
        kv.init("w", torch.zeros(3))
        kv.push("w", torch.ones(3))
        with pytest.raises(UserError, match="after the first push, whose gradient was sent whole"):
            kv.set_gradient_compression({"type": "2bit"})


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.bfloat16])
def test_only_float32_is_compressed(dtype: torch.dtype) -> None:
    with allstep.kvstore.create("dist_sync") as kv:
        kv.set_gradient_compression({"type": "2bit"})
        kv.init("n", torch.zeros(3, dtype=dtype))
        name = str(dtype).removeprefix("torch.")
        text = f"push of key 'n': compression 2bit:0.5 takes float32, and the key is {name}; put it"
        with pytest.raises(UserError, match=text):
            kv.push("n", torch.ones(3, dtype=dtype))


def test_workers_choose_the_same(ranks: Ranks) -> None:
    def work() -> None:
        kv = allstep.kvstore.create("dist_async")
        with pytest.raises(UserError, match=r"rank 0 passes 2bit:1, rank 1 passes 2bit:2"):
            kv.set_gradient_compression({"type": "2bit", "threshold": 1 + kv.rank})

    ranks(2, work)
