"""Squared norms that are taken while gradients pass through the buckets, against numpy in float64
on all ranks' gradients."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from allstep.comm.op.norms import GradientNorms, Squares, Wanted, share_of, values_of
from allstep.errors import CollectiveMismatch, UserError
from allstep.parallel.exchange import AllReduce, Exchange, Named, Owners, Rule, buckets
from support.default_group import joined
from support.ranks import Ranks

BOTH = Wanted(own=True, mean=True)
SHAPES = {
    "tiny": (3,),
    "scalar": (),
    "empty": (0, 4),
    "picture": (4, 3, 5, 5),
    "large": (700, 501),
    "table": (300, 7),
}
FEW = settings() if settings().max_examples > 100 else settings(max_examples=20)
WAYS = ["aa", "aaa", "aab", "abc"]


@FEW
@given(
    st.lists(st.integers(0, 300_000), max_size=2),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
def test_squares_of_all_that_is_shown(sizes: list[int], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(sum(sizes))
    shown = [torch.randn(size, generator=generator).to(dtype) for size in sizes]
    squares = Squares()
    for each in shown:
        squares.add(each)
    assert squares.total() == pytest.approx(
        sum(float(each.double().square().sum()) for each in shown), rel=1e-5
    )


@given(st.integers(0, 50), st.integers(1, 7))
def test_shares_are_the_whole(numel: int, count: int) -> None:
    parts = [share_of(torch.arange(numel), index, count) for index in range(count)]
    assert torch.cat(parts).tolist() == list(range(numel))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_what_a_square_overflows_or_hides() -> None:
    halves = Squares()
    halves.add(torch.full((4,), 1000.0, dtype=torch.float16))
    assert halves.total() == 4e6
    assert values_of(torch.tensor([3 + 4j])).square().sum() == 25
    table = torch.sparse_coo_tensor(
        torch.tensor([[1, 1]]), torch.tensor([[1.0], [2.0]]), (3, 1), check_invariants=True
    )
    assert values_of(table).tolist() == [3.0]  # the same row twice is one


def named_parameters() -> list[Named]:
    dtypes = {"table": torch.float64, "tiny": torch.bfloat16}
    named = [
        Named(name, nn.Parameter(torch.zeros(shape, dtype=dtypes.get(name, torch.float32))))
        for name, shape in SHAPES.items()
    ]
    image = named[list(SHAPES).index("picture")].parameter
    image.data = image.data.to(memory_format=torch.channels_last)
    return named


def gradient_of(rank: int, name: str, dtype: torch.dtype) -> Tensor:
    seed = rank * 100 + list(SHAPES).index(name)
    return torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(seed)).to(dtype)


def give_gradients(named: list[Named], rank: int, weight: float) -> None:
    """Nobody uses "scalar", only rank 1 "image"; the mean over no samples is not a number."""
    for name, parameter in named:
        parameter.grad = (
            gradient_of(rank, name, parameter.dtype)
            if weight
            else torch.full_like(parameter, torch.nan)
        )
    for name, parameter in named:
        if name == "scalar" or (name == "picture" and rank != 1):
            parameter.grad = None


def expected(named: list[Named], weights: list[float] | list[None]) -> GradientNorms:
    shares = [1.0 if weight is None else weight for weight in weights]

    def given(rank: int, name: str, dtype: torch.dtype) -> np.ndarray[Any, Any]:
        unused = name == "scalar" or (name == "picture" and rank != 1) or not shares[rank]
        return gradient_of(rank, name, dtype).double().numpy() * (0.0 if unused else 1.0)

    all_of = [[given(rank, name, p.dtype) for name, p in named] for rank in range(len(weights))]
    own = tuple(float(sum((each**2).sum() for each in mine)) for mine in all_of)
    means = [np.average(each, axis=0, weights=shares) for each in zip(*all_of, strict=True)]
    return GradientNorms(own, tuple(shares), float(sum((mean**2).sum() for mean in means)))


def check_close(found: GradientNorms | None, wanted: GradientNorms) -> None:
    assert found is not None
    assert found.own == pytest.approx(wanted.own, rel=1e-5)
    assert found.weights == wanted.weights
    assert found.mean == pytest.approx(wanted.mean, rel=1e-4)  # "tiny" is added in bfloat16


def check_steps(sums: Exchange, rank: int, size: int) -> list[GradientNorms]:
    """Equal shares, by samples with a rank that has none, only the mean, nothing: the gradients
    have the same bits with and without."""
    found = []
    for weights in ([None] * size, [3.0, 0.0, 5.0][:size] if size < 4 else [3.0, 0.0, 5.0, 2.0]):
        results = []
        for wanted in (BOTH, Wanted(mean=True), Wanted()):
            give_gradients(sums.named, rank, 1.0 if weights[rank] is None else weights[rank])
            for _, parameter in reversed(sums.named):
                sums.ready(parameter, weights[rank], wanted)
            sums.reduce(weights[rank], wanted=wanted)
            norms = sums.norms()
            results.append([None if p.grad is None else p.grad.clone() for _, p in sums.named])
            if wanted.own:
                check_close(norms, expected(sums.named, weights))
                assert norms is not None
                found.append(norms)
            elif wanted.mean:
                assert norms == found[-1]._replace(own=())
            else:
                assert norms is None
        for each in zip(*results, strict=True):
            assert all(
                other is None if each[0] is None else torch.equal(each[0], other)
                for other in each[1:]
            )
    return found


@pytest.mark.parametrize("places", WAYS)
def test_norms_of_what_passes_through(ranks: Ranks, places: str) -> None:
    def work() -> list[GradientNorms]:
        buckets.LARGE, buckets.BUCKET = 100_000, 200_000
        with joined() as (rank, size):
            group = dist.distributed_c10d._get_default_group()
            found = []
            for overlap in (False, True):
                found += check_steps(
                    AllReduce(group, f"{overlap}", named_parameters(), Rule(), overlap), rank, size
                )
            for whole in (False, True):
                found += check_steps(
                    Owners(group, f"{whole}", named_parameters(), Rule(), whole), rank, size
                )
            return found

    results = ranks(len(places), work, hosts=list(places), timeout=150)
    assert all(result == results[0] for result in results)  # the same on all ranks, to the bit


def test_a_rank_that_has_joined_takes_part(ranks: Ranks) -> None:
    """Its share of the mean is measured by itself, though it asked for nothing and has nothing of
    its own."""

    def work() -> None:
        buckets.LARGE = 100_000
        with joined() as (rank, _):
            group = dist.distributed_c10d._get_default_group()
            sums = AllReduce(group, "test", named_parameters(), Rule())
            if rank == 2:
                sums.reduce(absent=True)
            else:
                give_gradients(sums.named, rank, 1.0)
                sums.reduce(4.0, wanted=BOTH)
            check_close(sums.norms(), expected(sums.named, [4.0, 4.0, 0.0]))

    ranks(3, work)


def test_wanted_by_some_only(ranks: Ranks) -> None:
    def work() -> None:
        with joined() as (rank, _):
            group = dist.distributed_c10d._get_default_group()
            for wanted, words in (
                (BOTH, "1 of 2 ranks want the norms of their own gradients"),
                (Wanted(mean=True), "1 of 2 ranks want the norm of the mean gradient"),
            ):
                sums = AllReduce(group, words, named_parameters(), Rule())
                with pytest.raises(CollectiveMismatch, match=words):
                    sums.reduce(wanted=wanted if rank else Wanted())

    ranks(2, work)


def test_wanted_too_late(ranks: Ranks) -> None:
    """Between hosts the first buckets are on their way when backward() is over."""

    def work() -> None:
        with joined() as (rank, _):
            sums = AllReduce(
                dist.distributed_c10d._get_default_group(), "test", named_parameters(), Rule()
            )
            give_gradients(sums.named, rank, 1.0)
            sums.reduce()
            for _, parameter in reversed(sums.named):
                sums.ready(parameter)
            with pytest.raises(UserError, match="changed after backward"):
                sums.reduce(wanted=BOTH)
            sums.reduce()

    ranks(2, work, hosts=["a", "b"])
