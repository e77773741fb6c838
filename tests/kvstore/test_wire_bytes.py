"""Bytes on the links of compressed stores, as the kernel counts them, and what arrives."""

from typing import Any

import pytest
import torch
from torch import Tensor

import allstep.kvstore
from allstep.errors import UserError
from support.ranks import Ranks
from support.store_servers import with_servers

NUMEL, STEPS = 500_000, 4
HOSTS = "aab"


def gradient(rank: int, step: int) -> Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(10 * rank + step))


def sent_2bit(total: Tensor, threshold: float) -> Tensor:
    """Return what is sent of `total`, from which it is subtracted."""
    sent = torch.where(
        total >= threshold, threshold, torch.where(total <= -threshold, -threshold, 0)
    )
    total -= sent
    return sent


def expected(pull: str) -> list[Tensor]:
    """The weights after each round: a residual for each host, and one on the servers."""
    weights, held = torch.zeros(NUMEL), torch.zeros(NUMEL)
    residuals, found = torch.zeros(2, NUMEL), []
    for step in range(STEPS):
        residuals[0] += gradient(0, step) + gradient(1, step)
        residuals[1] += gradient(2, step)
        first, second = (sent_2bit(residual, 0.75) for residual in residuals)
        weights = weights.sub(first + second, alpha=0.5)
        if pull == "2bit:0.25":
            held = held + sent_2bit(weights - held, 0.25)
        found.append(weights if pull == "none" else held)
    return found


def nbytes(kv: Any) -> int:
    """Return the bytes that this worker's links have carried, both ways."""
    return sum(pair._sockets.nbytes() for pair in kv._values.servers._links._pairs)


def rounds(pull: str) -> int:
    with allstep.kvstore.create("dist_sync") as kv:
        kv.set_gradient_compression({"type": "2bit", "threshold": 0.75, "pull": pull})
        kv.init("w", torch.zeros(NUMEL))
        kv.set_optimizer(torch.optim.SGD, lr=0.5)
        out = torch.empty(NUMEL)
        kv.barrier()
        before = nbytes(kv)
        for step, weights in enumerate(expected(pull)):
            kv.pushpull("w", gradient(kv.rank, step), out=out)
            assert torch.equal(out, weights), (out - weights).abs().max()
        found = nbytes(kv) - before
        kv.barrier()
        return found


def pushes(codec: str, pull: str) -> int:
    with allstep.kvstore.create("dist_async") as kv:
        kv.init("w", torch.zeros(NUMEL))
        kv.set_gradient_compression({"type": codec, "pull": pull})
        kv.set_optimizer(torch.optim.SGD, lr=0.5)
        out = torch.empty(NUMEL)
        # The first pull is whole.
        kv.pull("w", out=out)
        kv.barrier()
        before = nbytes(kv)
        for step in range(STEPS):
            kv.pushpull("w", gradient(kv.rank, step), out=out)
        found = nbytes(kv) - before
        kv.barrier()
        for _ in range(5):
            kv.pull("w", out=out)
        if pull == "bf16" and codec == "bf16":
            total = sum(gradient(rank, step) for rank in range(3) for step in range(STEPS))
            assert torch.allclose(out, -0.5 * total, atol=0.05)
        kv.barrier()
        return found


def rows(name: str) -> int:
    """A step with 100 rows of a table of 100,000."""
    with allstep.kvstore.create(name) as kv:
        kv.init("table", torch.zeros(100_000, 16))
        kv.set_optimizer(torch.optim.Adam, lr=0.1)
        numbers = torch.arange(100) * 997
        gradient = torch.sparse_coo_tensor(
            numbers[None], torch.ones(100, 16), (100_000, 16), check_invariants=False
        )
        found = torch.sparse_coo_tensor(size=(100_000, 16), check_invariants=False)
        kv.barrier()
        before = nbytes(kv)
        for _ in range(2):
            kv.push("table", gradient)
            kv.row_sparse_pull("table", out=found, row_ids=numbers)
        total = nbytes(kv) - before
        kv.barrier()
        return total


def work() -> list[int]:
    with allstep.kvstore.create("dist_sync") as kv, pytest.raises(UserError, match="pull=1bit:0"):
        kv.set_gradient_compression({"type": "2bit", "pull": "1bit:0"})
    return [
        rounds("none"),
        rounds("2bit:0.25"),
        pushes("bf16", "none"),
        pushes("bf16", "bf16"),
        pushes("2bit", "2bit"),
        rows("dist_sync"),
        rows("dist_async"),
    ]


def test_encoded_bytes_cross_the_links(ranks: Ranks) -> None:
    whole, found = STEPS * NUMEL * 4, torch.tensor(with_servers(ranks, HOSTS, 2, work)).double()
    # A host pushes and pulls once, over the links of its workers.
    pushed_2bit, both_2bit = found[:2, 0].sum() + found[2, 0], found[:, 1].sum()
    assert 2 * whole * (1 / 16 + 1) < pushed_2bit < 2 * whole * (1 / 16 + 1) * 1.02
    assert 2 * whole * 2 / 16 < both_2bit < 2 * whole * 2 / 16 * 1.1
    for place, shares in ((2, 1 / 2 + 1), (3, 1 / 2 + 1 / 2), (4, 1 / 16 + 1 / 16)):
        for each in found[:, place]:
            assert whole * shares < each < whole * shares * (1.02 if shares > 0.2 else 1.1)
    # Of each row a number and 16 values are pushed, both are pulled; the table has 6.4 MB.
    own = 2 * 100 * (8 + 64 + 8 + 64)
    for each in found[:, 6]:
        assert own < each < 2 * own
    assert 2 * own < found[:, 5].sum() < 6 * own
