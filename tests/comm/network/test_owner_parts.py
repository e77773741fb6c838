"""The halves of an allreduce for parts with owners: sums in the order of ranks, and their cost."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from allstep.comm.network import owner_parts
from allstep.comm.network.algorithms import ALGORITHMS, Speed, choose
from allstep.comm.network.owner_parts import from_owners, sum_for_owners
from support.simulated_network import FREE, Run, simulate

WIRE = Speed(latency=50e-6, bandwidth=125e6, adding=5e9)  # 1 Gbit/s


def both_halves(
    inputs: list[torch.Tensor], sizes: list[list[int]], speed: Speed = FREE
) -> tuple[list[torch.Tensor], Run]:
    """Sum parts of these sizes, double them as an update would, and return them to all ranks."""
    tensors = [each.clone() for each in inputs]
    flat_sizes = [size for part in sizes for size in part]

    def work(exchange: object) -> None:
        rank = exchange.rank  # type: ignore[attr-defined]
        cut = iter(torch.split(tensors[rank], flat_sizes))
        parts = [[next(cut) for _ in part] for part in sizes]
        sum_for_owners(exchange, parts, exchange.combine(torch.add))  # type: ignore[arg-type, attr-defined]
        for tensor in parts[rank]:
            tensor.mul_(2)
        from_owners(exchange, parts)  # type: ignore[arg-type]

    return tensors, simulate(len(inputs), work, speed)


@given(
    sizes=st.lists(st.lists(st.integers(0, 40), max_size=3), min_size=1, max_size=6),
    block=st.integers(4, 64),
    seed=st.integers(0, 10**6),
)
def test_every_rank_gets_the_updates_of_sums_in_rank_order(
    sizes: list[list[int]], block: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    total = sum(map(sum, sizes))
    inputs = [torch.randn(total, generator=generator) for _ in sizes]
    expected = inputs[0].clone()
    for each in inputs[1:]:
        expected += each
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner_parts, "_BLOCK_BYTES", block)
        results, _ = both_halves(inputs, sizes)
    for found in results:
        assert torch.equal(found, expected * 2)


def test_two_hosts_exchange_no_more_than_by_allreduce() -> None:
    """32 MB over 1 Gbit/s by two lanes, each with half of the link: within 1.1 of the allreduce."""
    inputs = [torch.zeros(4 << 20) for _ in range(2)]
    half_link = Speed(WIRE.latency, WIRE.bandwidth / 2, WIRE.adding)
    _, served = both_halves(inputs, [[2 << 20], [2 << 20]], half_link)
    chosen = choose(2, inputs[0].nbytes, half_link)
    summed = [each.clone() for each in inputs]
    plain = simulate(
        2,
        lambda exchange: chosen.run(exchange, summed[exchange.rank], exchange.combine(torch.add)),
        half_link,
    )
    assert chosen in ALGORITHMS.values()
    assert served.seconds <= 1.1 * plain.seconds
    assert served.most("nbytes_sent") <= plain.most("nbytes_sent")
