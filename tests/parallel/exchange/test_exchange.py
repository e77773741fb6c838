"""One contract for every exchange: what comes out is what one process would compute, and a listener
hears of all of it."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from allstep.comm.op.gradient_norms import Wanted
from allstep.compression import codec_from
from allstep.parallel.exchange import AllReduce, Exchange, Named, Owners, Rule
from allstep.parallel.exchange.compressed_owners import CompressedOwners
from support.default_group import joined
from support.ranks import Ranks

Make = Callable[[Any, list[Named], Any], Exchange]
KINDS: dict[str, Make] = {
    "AllReduce": lambda group, named, listener: AllReduce(
        group, "test", named, Rule(), None, listener
    ),
    "AllReduce, several buckets": lambda group, named, listener: AllReduce(
        group, "test", named, Rule(), True, listener
    ),
    "Owners": lambda group, named, listener: Owners(group, "test", named, Rule(), False, listener),
    "Owners of whole parameters": lambda group, named, listener: Owners(
        group, "test", named, Rule(), True, listener
    ),
    # A codec that drops nothing.
    "CompressedOwners": lambda group, named, listener: CompressedOwners(
        group, "test", named, Rule(), False, codec_from("topk:100%"), listener
    ),
}
STEPS = 3
UNUSED = 1
"""The parameter that no rank uses."""


class Heard:
    """A listener that keeps what it hears."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.times: list[tuple[int, int, int]] = []
        self.is_on = True

    def is_listening(self) -> bool:
        return self.is_on

    def reduced(self, named: Sequence[Named], began: int, agreed: int, ended: int) -> None:
        self.names += [each.name for each in named]
        self.times.append((began, agreed, ended))


def model() -> list[Named]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 40), nn.Linear(40, 7), nn.Linear(7, 300))
    return [Named(name, parameter) for name, parameter in model.named_parameters()]


def gradient(parameter: Tensor, rank: int, step: int, number: int) -> Tensor:
    seed = torch.Generator().manual_seed(1000 * step + 10 * rank + number)
    return torch.randn(parameter.shape, generator=seed)


def one_step(exchange: Exchange, named: list[Named], rank: int, size: int, step: int) -> None:
    """Reduce, and hold what is ours against the mean that one process computes."""
    samples = [float(other + 1) for other in range(size)]
    for number, (_, parameter) in enumerate(named):
        parameter.grad = None if number == UNUSED else gradient(parameter, rank, step, number)
        exchange.ready(parameter, samples[rank], Wanted(True, True))
    assert exchange.reduce(samples[rank], wanted=Wanted(True, True)) == []
    assert exchange.used == set(range(len(named))) - {UNUSED}
    norms = exchange.norms()
    assert norms is not None
    means = {
        number: (
            sum(gradient(p, other, step, number).double() * samples[other] for other in range(size))
            / sum(samples)
        )
        for number, (_, p) in enumerate(named)
        if number != UNUSED
    }
    assert norms.mean == pytest.approx(
        sum(float((each**2).sum()) for each in means.values()), rel=1e-5
    )
    assert norms.weights == tuple(samples)
    for other in range(size):
        own = sum(
            float((gradient(p, other, step, n) ** 2).sum())
            for n, (_, p) in enumerate(named)
            if n != UNUSED
        )
        assert norms.own[other] == pytest.approx(own, rel=1e-5)
    exchange.scale_by(0.5)
    for number, start, end in ours(exchange, named):
        found = named[number].parameter.grad
        assert found is not None
        expected = 0.5 * means[number].reshape(-1)[start:end]
        torch.testing.assert_close(
            found.reshape(-1)[start:end].double(), expected, rtol=1e-5, atol=1e-6
        )
    assert named[UNUSED].parameter.grad is None


def ours(exchange: Exchange, named: list[Named]) -> list[tuple[int, int, int]]:
    """What of the result this rank may use: number, start and end."""
    ranges = exchange.own_ranges if isinstance(exchange, Owners) else None
    every = [(number, 0, each.parameter.numel()) for number, each in enumerate(named)]
    return [span for span in (every if ranges is None else ranges) if span[0] != UNUSED]


def keep_the_contract(kind: str) -> None:
    with joined() as (rank, size):
        named, heard = model(), Heard()
        exchange = KINDS[kind](dist.distributed_c10d._get_default_group(), named, heard)
        began = time.monotonic_ns()
        for step in range(STEPS):
            one_step(exchange, named, rank, size, step)
        expected = [each.name for number, each in enumerate(named) if number != UNUSED]
        assert sorted(heard.names) == sorted(STEPS * expected)
        for start, agreed, end in heard.times:
            assert began <= start <= agreed <= end <= time.monotonic_ns()
        heard.is_on = False
        one_step(exchange, named, rank, size, STEPS)
        assert len(heard.names) == STEPS * len(expected), "told although nobody listens"
        exchange.close()


@pytest.mark.parametrize("hosts", ["aa", "aaa", "ab"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_contract(ranks: Ranks, kind: str, hosts: str) -> None:
    ranks(len(hosts), keep_the_contract, kind, hosts=list(hosts))


def test_a_rank_that_is_absent(ranks: Ranks) -> None:
    """It adds nothing, and the others go on; of the exchanges only AllReduce can do without a rank."""

    def work() -> None:
        with joined() as (rank, size):
            named = model()
            exchange = AllReduce(dist.distributed_c10d._get_default_group(), "test", named, Rule())
            for number, (_, parameter) in enumerate(named):
                parameter.grad = gradient(parameter, rank, 0, number)
            exchange.reduce(absent=rank == 1)
            exchange.norms()
            if rank == 0:
                for number, (_, parameter) in enumerate(named):
                    torch.testing.assert_close(
                        parameter.grad, gradient(parameter, 0, 0, number) / size
                    )

    ranks(2, work)
