"""Gradients over ranks, against the same arithmetic in one process."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from allstep.errors import CollectiveMismatch
from allstep.parallel.exchange import AllReduce, Named, Rule, buckets
from support.default_group import joined
from support.ranks import Ranks

SHAPES = {
    "tiny": (3,),
    "scalar": (),
    "empty": (0, 4),
    "picture": (4, 3, 5, 5),
    "large": (700, 500),
    "table": (300, 7),
}
WAYS = {
    "one host": {},
    "three hosts": {"hosts": ["a", "b", "c"]},
    "two hosts": {"hosts": ["a", "a", "b"]},
}


def parameters_of(dtypes: dict[str, torch.dtype] | None = None) -> list[Named]:
    named = [
        Named(name, nn.Parameter(torch.zeros(shape, dtype=(dtypes or {}).get(name, torch.float32))))
        for name, shape in SHAPES.items()
    ]
    image = named[list(SHAPES).index("picture")].parameter
    image.data = image.data.to(memory_format=torch.channels_last)
    return named


def gradient_of(
    rank: int, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> Tensor:
    seed = rank * 100 + list(SHAPES).index(name)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def group() -> Any:
    return dist.distributed_c10d._get_default_group()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_mean_sum_and_mean_by_samples(ranks: Ranks, way: str, overlap: bool) -> None:
    def work() -> None:
        buckets.LARGE, buckets.BUCKET = 100_000, 200_000
        with joined() as (rank, size):
            for number, rule in enumerate([Rule(), Rule(mean=False), Rule(factor=0.5)]):
                named = parameters_of({"table": torch.float64, "tiny": torch.bfloat16})
                all_of_us = AllReduce(group(), f"test{number}", named, rule, overlap)
                for step, weights in enumerate([None, [2.0, 0.0, 5.0], None]):
                    for name, parameter in named:
                        given = gradient_of(rank + step, name, SHAPES[name], parameter.dtype)
                        parameter.grad = (
                            given.contiguous()
                            if step
                            else given.to(memory_format=torch.preserve_format)
                        )
                        if weights and not weights[rank]:
                            parameter.grad.fill_(torch.nan)  # the mean over no samples at all
                    own = weights[rank] if weights else None
                    for _, parameter in reversed(named):
                        all_of_us.ready(parameter, own)
                    assert all_of_us.reduce(own) == []
                    for name, parameter in named:
                        parts = [
                            gradient_of(r + step, name, SHAPES[name], parameter.dtype).double()
                            for r in range(size)
                        ]
                        shares = weights if weights else [1.0] * size
                        total = sum(part * share for part, share in zip(parts, shares, strict=True))
                        if rule.mean:
                            expected = total / sum(shares) * rule.factor
                        else:
                            expected = (
                                sum(parts[r] for r in range(size) if not weights or weights[r])
                                * rule.factor
                            )
                            if weights:
                                continue  # a sum has no use for weights
                        tolerance = 2e-2 if parameter.dtype == torch.bfloat16 else 1e-5
                        torch.testing.assert_close(
                            parameter.grad.double(), expected, rtol=tolerance, atol=tolerance
                        )

    ranks(3, work, timeout=150, **WAYS[way])


@pytest.mark.parametrize("way", WAYS)
def test_unused_parameters(ranks: Ranks, way: str) -> None:
    """Used nowhere: None everywhere. Used somewhere: zero counts for the others."""

    def work() -> None:
        buckets.LARGE = 100_000
        with joined() as (rank, size):
            named = parameters_of()
            users = {
                "tiny": [],
                "scalar": [0],
                "empty": [0, 1, 2],
                "picture": [1],
                "large": [2],
                "table": [0, 1],
            }
            all_of_us = AllReduce(group(), "test", named, Rule())
            for _ in range(2):
                for name, parameter in named:
                    parameter.grad = (
                        gradient_of(rank, name, SHAPES[name]) if rank in users[name] else None
                    )
                all_of_us.reduce()
                for name, parameter in named:
                    if not users[name]:
                        assert parameter.grad is None
                        continue
                    expected = sum(gradient_of(r, name, SHAPES[name]) for r in users[name]) / size
                    torch.testing.assert_close(parameter.grad, expected)

    ranks(3, work, timeout=150, **WAYS[way])


def test_bits_are_equal_on_all_ranks_and_in_all_runs(ranks: Ranks) -> None:
    def work() -> list[bytes]:
        buckets.LARGE = 100_000
        with joined() as (rank, _):
            named = parameters_of()
            for name, parameter in named:
                parameter.grad = gradient_of(rank, name, SHAPES[name])
            AllReduce(group(), "test", named, Rule()).reduce(float(rank + 1))
            return [parameter.grad.numpy().tobytes() for _, parameter in named]

    first, *others = [*ranks(3, work), *ranks(3, work)]
    assert all(other == first for other in others)


def test_compressed(ranks: Ranks) -> None:
    def work() -> None:
        rule = Rule(
            compress=lambda tensor: (tensor.half(), tensor.dtype),
            decompress=lambda tensor, kind: tensor.to(kind),
        )
        with joined() as (rank, size):
            named = parameters_of()
            for name, parameter in named:
                parameter.grad = gradient_of(rank, name, SHAPES[name])
            AllReduce(group(), "test", named, rule).reduce()
            for name, parameter in named:
                expected = sum(gradient_of(r, name, SHAPES[name]) for r in range(size)) / size
                assert parameter.grad.dtype == torch.float32
                torch.testing.assert_close(parameter.grad, expected, rtol=5e-3, atol=5e-3)

    ranks(3, work)


def test_complex_and_changed_parameters(ranks: Ranks) -> None:
    """A model that was moved to another dtype, on all ranks, is agreed on anew."""

    def work() -> None:
        with joined() as (rank, size):
            named = [
                Named("wave", nn.Parameter(torch.zeros(5, 2, dtype=torch.complex64))),
                *parameters_of(),
            ]
            all_of_us = AllReduce(group(), "test", named, Rule())
            for dtype in (torch.float32, torch.float64):
                for name, parameter in named[1:]:
                    parameter.data = parameter.data.to(dtype)
                    parameter.grad = gradient_of(rank, name, SHAPES[name], dtype)
                named[0].parameter.grad = torch.full(
                    (5, 2), complex(rank, 1), dtype=torch.complex64
                )
                all_of_us.reduce()
                assert torch.allclose(
                    named[0].parameter.grad, torch.tensor(complex((size - 1) / 2, 1))
                )
                for name, parameter in named[1:]:
                    expected = (
                        sum(gradient_of(r, name, SHAPES[name], dtype) for r in range(size)) / size
                    )
                    torch.testing.assert_close(parameter.grad, expected)

    ranks(2, work)


def test_an_absent_rank_lets_the_others_go_on(ranks: Ranks) -> None:
    def work() -> None:
        buckets.LARGE = 100_000
        with joined() as (rank, size):
            named = parameters_of()
            all_of_us = AllReduce(group(), "test", named, Rule())
            for step in range(3):
                for name, parameter in named:
                    parameter.grad = gradient_of(rank, name, SHAPES[name])
                if rank == 1 and step:
                    before = [parameter.grad.clone() for _, parameter in named]
                    all_of_us.reduce(absent=True)
                    assert all(
                        torch.equal(b, p.grad) for b, (_, p) in zip(before, named, strict=True)
                    )
                    continue
                all_of_us.reduce()
                here = [0, 2] if step else [0, 1, 2]
                for name, parameter in named:
                    expected = (
                        sum(gradient_of(r, name, SHAPES[name]) for r in here) / size
                    )  # Horovod divides by all
                    torch.testing.assert_close(parameter.grad, expected)

    ranks(3, work)


def test_sparse_ones_are_left_to_the_caller(ranks: Ranks) -> None:
    def work() -> list[str]:
        with joined() as (rank, _):
            named = parameters_of()
            for name, parameter in named:
                parameter.grad = torch.ones(SHAPES[name])
            table = named[list(SHAPES).index("table")].parameter
            table.grad = torch.ones(300, 7).to_sparse(1) if rank == 1 else None
            found = [each.name for each in AllReduce(group(), "test", named, Rule()).reduce()]
            assert (table.grad is None) == (rank != 1)  # untouched
            return found

    assert ranks(3, work) == [["table"]] * 3


def test_order_and_differences(ranks: Ranks) -> None:
    """Ranks may list their parameters in any order; which they are must agree, and the error says
    where not."""

    def reduce_in_own_order() -> None:
        with joined() as (rank, size):
            named = parameters_of()
            for name, parameter in named:
                parameter.grad = gradient_of(rank, name, SHAPES[name])
            AllReduce(group(), "test", named[rank:] + named[:rank], Rule()).reduce()
            for name, parameter in named:
                expected = sum(gradient_of(r, name, SHAPES[name]) for r in range(size)) / size
                torch.testing.assert_close(parameter.grad, expected)

    ranks(3, reduce_in_own_order)

    def differ(change: Callable[[list[Named]], list[Named]]) -> str:
        with joined() as (rank, _):
            named = parameters_of()
            with pytest.raises(CollectiveMismatch) as caught:
                AllReduce(group(), "test", change(named) if rank == 1 else named, Rule()).reduce()
            return str(caught.value)

    def other_shape(named: list[Named]) -> list[Named]:
        return [Named("tiny", nn.Parameter(torch.zeros(4))), *named[1:]]

    for change, words in [
        (
            other_shape,
            (
                "'tiny' is float32 [3] with strides [1] on cpu on rank 0 and float32 [4] with"
                " strides [1] on cpu on rank 1"
            ),
        ),
        (
            lambda named: named[1:],
            "'tiny' is float32 [3] with strides [1] on cpu on rank 0 and missing on rank 1",
        ),
    ]:
        assert all(words in text for text in ranks(3, partial(differ, change)))


def test_samples_told_by_some_only(ranks: Ranks) -> None:
    def work() -> str:
        with joined() as (rank, _):
            named = parameters_of()
            with pytest.raises(CollectiveMismatch) as caught:
                AllReduce(group(), "test", named, Rule()).reduce(3.0 if rank == 0 else None)
            return str(caught.value)

    assert all("1 of 3 ranks set the number of samples" in text for text in ranks(3, work))
