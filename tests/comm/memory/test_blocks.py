"""Sums in blocks: every edge of a block, in every kind of memory, against the sum of one process,
bit for bit."""

import os
import random
from functools import reduce as fold

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from allstep import machine
from allstep.comm import shared_empty
from allstep.comm.memory.arena import Arena, block_bytes
from support.default_group import joined
from support.ranks import Ranks

KB, MB = 1 << 10, 1 << 20
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
DTYPES = [*FLOATS, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]
COMBINE = {"SUM": torch.add, "AVG": torch.add, "MIN": torch.minimum}


def arena() -> Arena:
    return dist.distributed_c10d._get_default_group().local.arena


def inputs_of(size: int, dtype: torch.dtype, numel: int, seed: int) -> list[Tensor]:
    """The tensors of all ranks, the same on each."""
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return [torch.randn(numel, generator=generator).mul_(3).to(dtype) for _ in range(size)]
    return [torch.randint(0, 20, (numel,), generator=generator).to(dtype) for _ in range(size)]


def in_rank_order(op: str, inputs: list[Tensor]) -> Tensor:
    """What one process computes: rank 0, then 1, ..."""
    total = fold(COMBINE[op], inputs)
    return total / len(inputs) if op == "AVG" else total


@pytest.mark.parametrize(
    ("level_2", "block"),
    [
        (None, MB),
        (128 * KB, 256 * KB),
        (512 * KB, 256 * KB),
        (MB, 512 * KB),
        (2 * MB, MB),
        (64 * MB, MB),
    ],
)
def test_a_block_is_half_of_the_second_level_cache(level_2: int | None, block: int) -> None:
    assert block_bytes(level_2) == block


def sums_around_edges(seed: int) -> int:
    """Sizes around multiples of a block, in four kinds of memory.

    The number of exchanges in shared memory.
    """
    draw = random.Random(seed)  # the same on every rank
    with joined() as (_, size):
        start, block = arena().flags.count, arena().block
        edges = [block, size * block, 256 * KB, size * 256 * KB]
        for case in range(24):
            dtype = draw.choice(DTYPES)
            numel = draw.choice(edges) * draw.choice([1, 2, 3]) // dtype.itemsize + draw.choice(
                [-64, -1, 0, 1, 63]
            )
            op = draw.choice(
                ["SUM", "MIN", *(["AVG"] if dtype in (torch.float32, torch.float64) else [])]
            )
            check_sums(op, inputs_of(size, dtype, numel, case))
        return arena().flags.count - start


def check_sums(op: str, inputs: list[Tensor]) -> None:
    expected, mine, kind = (
        in_rank_order(op, inputs),
        inputs[dist.get_rank()],
        getattr(dist.ReduceOp, op),
    )
    numel, dtype = mine.numel(), mine.dtype

    private = mine.clone()
    dist.all_reduce(private, kind)
    assert torch.equal(private, expected), (dtype, op, numel)

    around = torch.full((numel + 7,), 3, dtype=dtype)
    part = around[3:-4]
    part.copy_(mine)
    dist.all_reduce(part, kind)
    assert torch.equal(part, expected), (dtype, op, numel)
    assert (around[:3] == 3).all() and (around[-4:] == 3).all()

    columns = torch.full((numel, 2), 3, dtype=dtype)
    columns[:, 1] = mine
    dist.all_reduce(columns[:, 1], kind)
    assert torch.equal(columns[:, 1], expected), (dtype, op, numel)
    assert (columns[:, 0] == 3).all()

    shared = shared_empty(numel, dtype)
    for _ in range(2):
        shared.copy_(mine)
        dist.all_reduce(shared, kind)
        assert torch.equal(shared, expected), (dtype, op, numel)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_sums_around_the_edges_of_blocks(ranks: Ranks, num_ranks: int) -> None:
    exchanges = ranks(num_ranks, sums_around_edges, num_ranks, timeout=150)
    assert exchanges[0] > 0 and len(set(exchanges)) == 1  # all through shared memory


def test_ranks_that_see_different_caches_use_the_same_block(ranks: Ranks) -> None:
    def check() -> int:
        seen = [{1: 32 * KB, 2: MB}, {}][int(os.environ["RANK"])]
        machine.cache_sizes = lambda: seen
        with joined():
            total = torch.arange(500_000.0)
            dist.all_reduce(total)
            assert torch.equal(total, 2 * torch.arange(500_000.0))
            return arena().block

    assert ranks(2, check) == [512 * KB, 512 * KB]


@pytest.mark.parametrize("numel", [100, 300_000])
def test_two_ranks_keep_the_order_of_ranks(ranks: Ranks, numel: int) -> None:
    """Where the order shows: which of two NaNs becomes the sum depends on which is the first
    operand."""

    def check() -> bool:
        with joined() as (rank, _):
            inputs = [
                torch.full((numel,), 0x7FC00001 + each, dtype=torch.int32) for each in range(2)
            ]
            first, second = (bits.view(torch.float32) for bits in inputs)
            expected = (first + second).view(torch.int32)
            assert not torch.equal(expected, (second + first).view(torch.int32))
            dist.all_reduce((first, second)[rank])
            return torch.equal(inputs[rank], expected)

    assert ranks(2, check) == [True, True]


@pytest.mark.parametrize("factor", [1.0, 0.3])
def test_a_scaled_sum_of_several_blocks(ranks: Ranks, factor: float) -> None:
    """Scaled values are added from the pool, unscaled ones from the tensor: same bits as one
    process."""

    def check() -> bool:
        with joined() as (rank, size):
            inputs = inputs_of(size, torch.float32, 700_001, 3)
            mine = inputs[rank].clone()
            dist.all_reduce(mine, dist._make_nccl_premul_sum(factor))
            return torch.equal(mine, in_rank_order("SUM", [each * factor for each in inputs]))

    assert ranks(2, check) == [True, True]


@pytest.mark.parametrize("numel", [101, 400_001])
def test_a_rank_without_the_result_keeps_its_values(ranks: Ranks, numel: int) -> None:
    def check() -> bool:
        with joined() as (rank, size):
            inputs = inputs_of(size, torch.float32, numel, 5)
            mine = inputs[rank].clone()
            dist.reduce(mine, 1)
            return torch.equal(mine, in_rank_order("SUM", inputs) if rank == 1 else inputs[0])

    assert ranks(2, check) == [True, True]
