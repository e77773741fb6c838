"""Compressed sums between hosts, against a serial model with one residual for each host."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from allstep.compression import codec_from
from allstep.parallel.exchange import Named, Rule
from allstep.parallel.exchange.compressed_owners import CompressedOwners
from support.default_group import joined
from support.ranks import Ranks

SHAPES = [(300, 40), (40,), (7, 300), (300,)]
STEPS, RARE = 6, 3
"""Parameter 3 has a gradient in every other step only: its residual waits for the next one."""


def gradient(rank: int, step: int, number: int) -> Tensor:
    """Eighths, so that sums are exact in any order."""
    draws = torch.Generator().manual_seed(1000 * step + 10 * rank + number)
    return torch.randint(-9, 10, SHAPES[number], generator=draws) / 8


def quantized(total: Tensor, text: str) -> Tensor:
    if text == "bf16":
        return total.bfloat16().float()
    t = float(text.partition(":")[2])
    return torch.where(total >= t, t, torch.where(total <= -t, -t, 0.0))


def expected(hosts: str, text: str) -> list[list[Tensor]]:
    """The sums after each step: each host quantizes what it has and what is left of before."""
    names = sorted(set(hosts))
    residuals = {name: [torch.zeros(shape) for shape in SHAPES] for name in names}
    found = []
    for step in range(STEPS):
        sums = [torch.zeros(shape) for shape in SHAPES]
        for name in names:
            for number, rest in enumerate(residuals[name]):
                if number == RARE and step % 2:
                    continue
                for rank, host in enumerate(hosts):
                    rest += gradient(rank, step, number) if host == name else 0
                sent = quantized(rest, text)
                rest -= sent
                sums[number] += sent
        found.append(sums)
    return found


def check(hosts: str, text: str) -> Any:
    with joined() as (rank, _):
        named = [Named(str(n), nn.Parameter(torch.zeros(s))) for n, s in enumerate(SHAPES)]
        group: Any = dist.distributed_c10d._get_default_group()
        codec = codec_from(text)
        assert codec is not None
        owners = CompressedOwners(group, "test", named, Rule(mean=False), False, codec)
        for step, sums in enumerate(expected(hosts, text)):
            for number, (_, parameter) in enumerate(named):
                is_unused = number == RARE and step % 2
                parameter.grad = None if is_unused else gradient(rank, step, number)
            owners.reduce()
            for number, start, end in owners.own_ranges:
                if number == RARE and step % 2:
                    continue
                grad = owners.named[number].parameter.grad
                assert grad is not None
                place = int(owners.named[number].name)
                assert torch.equal(grad.view(-1)[start:end], sums[place].view(-1)[start:end])
        return owners.own_ranges


@pytest.mark.parametrize(
    ("hosts", "text"), [("aabb", "2bit:1.5"), ("aab", "bf16"), ("abc", "2bit:1")]
)
def test_each_host_keeps_what_it_has_not_sent(ranks: Ranks, hosts: str, text: str) -> None:
    found = ranks(len(hosts), check, hosts, text, hosts=list(hosts))
    assert any(found)


def test_on_one_host_nothing_is_encoded(ranks: Ranks) -> None:
    def work() -> None:
        with joined() as (rank, _):
            parameter = nn.Parameter(torch.zeros(1000))
            group: Any = dist.distributed_c10d._get_default_group()
            codec = codec_from("2bit:5")
            assert codec is not None
            named = [Named("w", parameter)]
            owners = CompressedOwners(group, "test", named, Rule(mean=False), False, codec)
            parameter.grad = torch.full((1000,), 1.0 + rank)
            owners.reduce()
            for _, start, end in owners.own_ranges:
                assert (parameter.grad[start:end] == 3).all()

    ranks(2, work)
