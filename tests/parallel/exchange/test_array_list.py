"""Lists of arrays that are not parameters, against sums on one process."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from allstep.errors import UserError
from allstep.parallel.exchange import ArrayList, Rule
from support.default_group import joined
from support.ranks import Ranks

SHAPES = {"small": (3, 5), "scalar": (), "empty": (0, 4), "large": (700, 500), "unused": (7,)}
WAYS = {"aa": 2, "aaa": 3, "ab": 2}


def arrays_of(rank: int, step: int) -> dict[str, Any]:
    """Return what a rank has in a step: rank 1 lacks "small" in step 1, none has "unused"."""
    source = torch.Generator().manual_seed(100 * rank + step)
    made = {name: torch.randn(shape, generator=source) for name, shape in SHAPES.items()}
    made["double"] = torch.randn(6, generator=source, dtype=torch.float64)
    made["unused"] = None
    if (rank, step) == (1, 1):
        made["small"] = None
    return made


def likes() -> list[tuple[str, Any]]:
    made = arrays_of(0, 0)
    return [
        (name, torch.zeros(SHAPES["unused"]) if value is None else value)
        for name, value in made.items()
    ]


def mean_of(name: str, step: int, weights: list[float]) -> Any:
    """Return the weighted mean over the ranks; None if no rank has the array."""
    found = [arrays_of(rank, step)[name] for rank in range(len(weights))]
    if all(value is None for value in found):
        return None
    total = sum(weights)
    parts = [
        value.double() * weight / total
        for value, weight in zip(found, weights, strict=True)
        if value is not None
    ]
    return torch.stack(parts).sum(0)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("places", WAYS)
def test_the_mean_of_all_ranks(ranks: Ranks, places: str, in_place: bool) -> None:
    def work() -> None:
        with joined() as (rank, size):
            group = dist.distributed_c10d._get_default_group()
            made = ArrayList(group, "test", likes(), Rule(), in_place=in_place)
            kept = []
            for step in range(12):
                # Step 2 has numbers of samples, and a rank without any.
                weights = [float(r) for r in range(size)] if step == 2 else [1.0] * size
                given = arrays_of(rank, step)
                copies = {n: v.clone() for n, v in given.items() if v is not None}
                weight = weights[rank] if step == 2 else None
                results = made.reduce(list(given.values()), weight)
                for (name, value), result in zip(given.items(), results, strict=True):
                    expected = mean_of(name, step, weights)
                    if expected is None:
                        assert result is None
                        continue
                    torch.testing.assert_close(
                        result.double(), expected, rtol=1e-6, atol=5e-7, msg=f"{name} {step}"
                    )
                    if value is not None and value.numel():
                        shared = result.data_ptr() == value.data_ptr()
                        assert shared == in_place, name
                        assert in_place or torch.equal(value, copies[name]), "the input was changed"
                kept.append((step, results))
            if not in_place:
                # Results that a framework keeps are never written again.
                for step, results in kept:
                    if step == 2:
                        continue
                    for name, result in zip(given, results, strict=True):
                        expected = mean_of(name, step, [1.0] * size)
                        if expected is not None:
                            torch.testing.assert_close(
                                result.double(), expected, rtol=1e-6, atol=5e-7
                            )
            made.close()

    ranks(WAYS[places], work, hosts=list(places))


def test_buffers_are_used_again(ranks: Ranks) -> None:
    def work() -> int:
        with joined() as (rank, _):
            group = dist.distributed_c10d._get_default_group()
            made = ArrayList(group, "test", [("a", torch.zeros(1000))], Rule(), in_place=False)
            places = set()
            result = None
            for _ in range(20):
                # Rank 0 drops each result before the next step, rank 1 holds it during the next.
                if rank == 0:
                    result = None
                result = made.reduce([torch.ones(1000)])[0]
                assert result is not None
                places.add(result.data_ptr())
            return len(places)

    assert ranks(2, work) == [2, 2]


def test_a_rank_that_has_joined_takes_part(ranks: Ranks) -> None:
    def work() -> list[float] | None:
        with joined() as (rank, _):
            group = dist.distributed_c10d._get_default_group()
            made = ArrayList(
                group, "test", [("a", torch.zeros(3))], Rule(mean=False), in_place=False
            )
            if rank == 1:
                made.participate()
                return None
            result = made.reduce([torch.tensor([1.0, 2.0, 3.0])])[0]
            assert made.exchange.norms() is None and result is not None
            return result.tolist()

    assert ranks(2, work) == [[1.0, 2.0, 3.0], None]


def test_other_arrays_than_agreed_are_refused(ranks: Ranks) -> None:
    def work() -> None:
        with joined():
            group = dist.distributed_c10d._get_default_group()
            made = ArrayList(group, "test", [("a", torch.zeros(3))], Rule(), in_place=False)
            for arrays, expected in (
                ([], "expected 1 arrays, found 0"),
                ([torch.zeros(4)], r"array 'a': expected torch.float32 \[3\], found .* \[4\]"),
                ([torch.zeros(3).double()], "expected torch.float32"),
            ):
                with pytest.raises(UserError, match=expected):
                    made.reduce(arrays)

    ranks(2, work)


def test_lists_that_differ_between_ranks_are_an_error_on_all(ranks: Ranks) -> None:
    def work() -> str:
        from allstep.errors import CollectiveMismatch

        with joined() as (rank, _):
            group = dist.distributed_c10d._get_default_group()
            made = ArrayList(group, "test", [("a", torch.zeros(3 + rank))], Rule(), in_place=False)
            with pytest.raises(CollectiveMismatch) as caught:
                made.reduce([torch.zeros(3 + rank)])
            return str(caught.value)

    assert all("parameter 'a' is float32 [3]" in text for text in ranks(2, work))
