"""Which rank reads what: exact cover for any number of samples, workers and positions."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allstep.data import order
from allstep.errors import ConfigError

SEEDS = st.integers(0, 2**40)
RECORDED_SMALL = [3, 5, 1, 2, 0, 8, 9, 6]
RECORDED_LARGE = [728527524015, 46185420293, 530730195470, 731544297258]


@settings(deadline=None)
@given(n=st.integers(1, 3000), seed=SEEDS, epoch=st.integers(0, 1000))
def test_an_epoch_has_every_sample_once(n: int, seed: int, epoch: int) -> None:
    assert sorted(order.epoch_order(np.arange(n), n, seed, epoch).tolist()) == list(range(n))


@settings(deadline=None)
@given(n=st.integers(1, 10**15), seed=SEEDS, data=st.data())
def test_any_position_of_any_set_is_answered_by_itself(
    n: int, seed: int, data: st.DataObject
) -> None:
    positions = np.array(sorted(data.draw(st.sets(st.integers(0, n - 1), min_size=1, max_size=20))))
    together = order.epoch_order(positions, n, seed, 0)
    assert together.dtype == np.int64
    assert len(set(together.tolist())) == len(positions)
    assert together.min() >= 0
    assert together.max() < n
    alone = [order.epoch_order(positions[i : i + 1], n, seed, 0)[0] for i in range(len(positions))]
    assert together.tolist() == alone


def test_seed_epoch_and_purpose_change_the_order() -> None:
    first = order.epoch_order(np.arange(1000), 1000, 0, 0)
    others = [
        order.epoch_order(np.arange(1000), 1000, 0, 1),
        order.epoch_order(np.arange(1000), 1000, 1, 0),
        order.kept(np.arange(1000), 1000, 0, 0),
    ]
    assert all((first == other).mean() < 0.02 for other in others)


def test_the_order_is_the_same_on_every_machine_and_in_every_version() -> None:
    """A run that is resumed after an upgrade must not see a sample twice.

    Reference: recorded when the format was fixed.
    """
    assert order.epoch_order(np.arange(8), 10, seed=1, epoch=2).tolist() == RECORDED_SMALL
    assert order.epoch_order(np.arange(4), 10**12, seed=1, epoch=2).tolist() == RECORDED_LARGE


@pytest.mark.parametrize("n", [7, 64, 100])
def test_the_order_looks_random(n: int) -> None:
    """Every sample is equally often at every position: chi-squared against the uniform table,
    within 5 std."""
    rounds = 2000
    table = np.zeros((n, n))
    for seed in range(rounds):
        table[np.arange(n), order.epoch_order(np.arange(n), n, seed, 0)] += 1
    chi_squared = ((table - rounds / n) ** 2 / (rounds / n)).sum()
    freedom = (n - 1) ** 2
    assert chi_squared < freedom + 5 * math.sqrt(2 * freedom)


def test_neighbours_are_torn_apart() -> None:
    numbers = order.epoch_order(np.arange(10000), 10000, 3, 0)
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.05
    assert (np.abs(np.diff(numbers)) == 1).mean() < 0.002


def test_no_positions_and_wrong_positions() -> None:
    assert order.epoch_order(np.arange(0), 0, 0, 0).size == 0
    for wrong in ([10], [-1]):
        with pytest.raises(IndexError, match=r"not all in 0\.\.9"):
            order.epoch_order(np.array(wrong), 10, 0, 0)


@settings(deadline=None)
@given(n=st.integers(1, 2000), seed=SEEDS, data=st.data())
def test_kept_and_held_out_are_everything_once(n: int, seed: int, data: st.DataObject) -> None:
    validation = data.draw(st.integers(0, n))
    kept = order.kept(np.arange(n - validation), n, validation, seed)
    held_out = order.held_out(n, validation, seed)
    assert len(held_out) == validation
    assert sorted([*kept.tolist(), *held_out.tolist()]) == list(range(n))


def test_more_cannot_be_held_out_than_there_is() -> None:
    with pytest.raises(ValueError, match="11 of 10"):
        order.held_out(10, 11, 0)


@pytest.mark.parametrize(("n", "expected"), [(60000, 5000), (50000, 5000), (1437, 143), (5, 0)])
def test_default_validation(n: int, expected: int) -> None:
    assert order.default_validation(n) == expected


@settings(deadline=None)
@given(count=st.integers(0, 5000), size=st.integers(1, 300))
def test_shares_cover_the_batch_and_differ_by_at_most_one(count: int, size: int) -> None:
    even = order.even(size)
    shares = [range(count)[order.share(count, rank, even)] for rank in range(size)]
    assert [number for share in shares for number in share] == list(range(count))
    lengths = {len(share) for share in shares}
    assert max(lengths) - min(lengths) <= 1


@settings(deadline=None)
@given(
    count=st.integers(0, 5000),
    weights=st.lists(st.integers(1, 1000), min_size=1, max_size=40).map(tuple),
    factor=st.integers(1, 99),
)
def test_any_weights_cover_the_batch_in_order(
    count: int, weights: order.Weights, factor: int
) -> None:
    """Reference of the lengths: the exact fractions, from which none is a sample away."""
    shares = [range(count)[order.share(count, rank, weights)] for rank in range(len(weights))]
    assert [number for share in shares for number in share] == list(range(count))
    assert order.lengths(count, weights) == [len(share) for share in shares]
    for share, weight in zip(shares, weights, strict=True):
        assert abs(len(share) - count * weight / sum(weights)) < 1
    multiple = tuple(factor * weight for weight in weights)
    assert order.lengths(count, multiple) == order.lengths(count, weights)


@settings(deadline=None)
@given(count=st.integers(0, 5000), size=st.integers(1, 300), weight=st.integers(1, 1000))
def test_equal_weights_are_the_even_split(count: int, size: int, weight: int) -> None:
    """Reference: the formula of the versions without weights."""
    expected = [slice(rank * count // size, (rank + 1) * count // size) for rank in range(size)]
    assert [order.share(count, rank, (weight,) * size) for rank in range(size)] == expected


@pytest.mark.parametrize(
    "wrong", [[], [1], [1, 2, 3], [1, 0], [1, -2], [1, 1.5], [1, True], [1, "2"], [1, 1 << 21]]
)
def test_weights_that_are_refused(wrong: list[Any]) -> None:
    expected = (
        r"^shares=\[.*\]: expected one whole number from 1 to 1,048,576 for each of 2 workers$"
    )
    with pytest.raises(ConfigError, match=expected):
        order.check_weights(wrong, 2)


def readers(
    n: int,
    seed: int | None,
    size: int,
    partition: order.Partition = "share",
    weights: order.Weights = (),
) -> list[order.Reader]:
    return [order.Reader(n, seed, rank, size, partition, weights) for rank in range(size)]


RUNS = {
    "n": st.integers(0, 200),
    "batch": st.integers(1, 250),
    "size": st.integers(1, 20),
    "seed": st.none() | SEEDS,
}


@settings(max_examples=60)
@given(**RUNS, position=st.integers(0, 600), length=st.integers(0, 600))
def test_all_ranks_have_the_batches_of_one_cut_into_shares(
    n: int, batch: int, size: int, seed: int | None, position: int, length: int
) -> None:
    """For any part of a run. Reference: one worker with batches of one sample."""
    stop = position + length
    plans = [list(order.plan(reader, position, stop, batch)) for reader in readers(n, seed, size)]
    assert len({len(plan) for plan in plans}) == 1
    together: list[int] = []
    for shares in zip(*plans, strict=True):
        span = shares[0][0]
        assert all(other == span for other, _ in shares)
        assert span.position == position + len(together)
        assert span.epoch * n + span.start == span.position
        assert 1 <= span.stop - span.start <= batch
        assert span.stop <= n
        lengths = [len(numbers) for _, numbers in shares]
        assert max(lengths) - min(lengths) <= 1
        assert sum(lengths) == span.stop - span.start
        together += [number for _, numbers in shares for number in numbers.tolist()]
    (alone,) = readers(n, seed, 1)
    assert together == [int(numbers[0]) for _, numbers in order.plan(alone, position, stop, 1)]
    assert len(together) == (length if n else 0)


@settings(max_examples=60)
@given(**RUNS, data=st.data(), position=st.integers(0, 600), length=st.integers(0, 600))
def test_the_weights_change_only_who_reads_a_sample(
    n: int,
    batch: int,
    size: int,
    seed: int | None,
    data: st.DataObject,
    position: int,
    length: int,
) -> None:
    """Every sample once, in the order of one worker."""
    stop = position + length
    weights = data.draw(st.tuples(*[st.integers(1, 50)] * size))
    weighted = readers(n, seed, size, weights=weights)
    plans = [list(order.plan(reader, position, stop, batch)) for reader in weighted]
    (alone,) = readers(n, seed, 1)
    expected = list(order.plan(alone, position, stop, batch))
    assert len({len(plan) for plan in plans}) == 1
    for shares, (span, numbers) in zip(zip(*plans, strict=True), expected, strict=True):
        assert all(other == span for other, _ in shares)
        assert [len(mine) for _, mine in shares] == order.lengths(len(numbers), weights)
        assert np.concatenate([mine for _, mine in shares]).tolist() == numbers.tolist()


@settings(max_examples=60)
@given(
    n=st.integers(1, 150),
    batch=st.integers(1, 200),
    size=st.integers(1, 20),
    seed=SEEDS,
    epoch=st.integers(0, 9),
)
def test_an_epoch_is_covered_exactly(n: int, batch: int, size: int, seed: int, epoch: int) -> None:
    plans = [
        order.plan(reader, epoch * n, (epoch + 1) * n, batch) for reader in readers(n, seed, size)
    ]
    assert sorted(
        number for plan in plans for _, numbers in plan for number in numbers.tolist()
    ) == list(range(n))


@settings(max_examples=60)
@given(
    data=st.data(),
    n=st.integers(1, 150),
    seed=SEEDS,
    sizes=st.tuples(st.integers(1, 9), st.integers(1, 9)),
)
def test_resuming_with_another_number_of_workers_gives_the_same_sequence(
    data: st.DataObject, n: int, seed: int, sizes: tuple[int, int]
) -> None:
    position = data.draw(st.integers(0, 3 * n))
    batches = data.draw(st.tuples(st.integers(1, 60), st.integers(1, 60)))
    found: list[int] = []
    for size, batch, (start, stop) in zip(
        sizes, batches, ((0, position), (position, 3 * n)), strict=True
    ):
        plans = [order.plan(reader, start, stop, batch) for reader in readers(n, seed, size)]
        found += [
            number
            for shares in zip(*plans, strict=True)
            for _, mine in shares
            for number in mine.tolist()
        ]
    expected = [order.epoch_order(np.arange(n), n, seed, epoch).tolist() for epoch in range(3)]
    assert found == [number for numbers in expected for number in numbers]


@settings(max_examples=60)
@given(n=st.integers(1, 200), batch=st.integers(1, 250), size=st.integers(1, 12), seed=SEEDS)
def test_whole_no_rank_reads_a_sample_twice_in_an_epoch(
    n: int, batch: int, size: int, seed: int
) -> None:
    shares = [list(order.plan(reader, n, 2 * n, batch)) for reader in readers(n, seed, size)]
    whole = [
        list(order.plan(reader, n, 2 * n, batch)) for reader in readers(n, seed, size, "whole")
    ]
    for plan, other in zip(whole, shares, strict=True):
        numbers = [number for _, mine in plan for number in mine.tolist()]
        assert len(set(numbers)) == len(numbers)
        # Number and sizes of the batches are those of the partition "share".
        assert [len(mine) for _, mine in plan] == [len(mine) for _, mine in other]


def test_whole_the_orders_of_ranks_have_nothing_to_do_with_each_other() -> None:
    first, second = (
        np.concatenate([mine for _, mine in order.plan(reader, 0, 4000, 100)])
        for reader in readers(4000, 1, 2, "whole")
    )
    # Each rank reads 2000, half of the dataset; independent halves share 1000 on average.
    assert 800 < len(np.intersect1d(first, second)) < 1200


def test_every_kind_of_integer_names_the_same_order() -> None:
    for kind in (np.int64, np.uint8, np.int32):
        found = order.epoch_order(np.arange(200), kind(200), kind(3), kind(2))
        np.testing.assert_array_equal(found, order.epoch_order(np.arange(200), 200, 3, 2))
    reader = order.Reader(1000, 3)
    plan = order.plan(reader, np.int64(0), np.int64(1000), np.int64(10))  # type: ignore[arg-type]
    assert sorted(number for _, mine in plan for number in mine.tolist()) == list(range(1000))
    with pytest.raises(TypeError):
        order.epoch_order(np.arange(5), 5, 3.0, 0)  # type: ignore[arg-type]
