"""Random numbers by sample: uniform, unrelated to those of neighbors, and equal in all workers."""

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from allstep.data.random.draws import Draws, Floats, _key

RECORDED = [
    [0.09367056049131517, 0.09859369607056756],
    [0.871021751036555, 0.28160573172171566],
    [0.2530516975187329, 0.5317835822367598],
]


def draws(samples: object, seed: int = 1, epoch: int = 0) -> Draws:
    return Draws(seed, epoch, np.asarray(samples, dtype=np.int64))


@given(
    samples=st.lists(st.integers(0, 2**40), min_size=1, max_size=20),
    seed=st.integers(0, 2**63),
    epoch=st.integers(0, 9999),
)
def test_a_number_does_not_depend_on_the_batch(samples: list[int], seed: int, epoch: int) -> None:
    together = draws(samples, seed, epoch)
    for row, sample in enumerate(samples):
        alone = draws([sample], seed, epoch)
        assert np.array_equal(alone.uniform("a", 5)[0], together.uniform("a", 5)[row])
        assert np.array_equal(alone.uniform("a", 3)[0], together.uniform("a", 5)[row, :3])
        assert np.array_equal(alone.lasting("a", 2)[0], together.lasting("a", 2)[row])
        assert alone.generator(0, "a").random() == together.generator(row, "a").random()


def test_numbers_are_the_same_in_every_version() -> None:
    """A resumed run must continue with the same images.

    Reference: recorded when the format was fixed.
    """
    drawn = draws([0, 1, 2**40], seed=7, epoch=3).uniform("Flip", 2)
    assert drawn.tolist() == RECORDED


def test_seed_epoch_sample_stream_and_column_all_matter() -> None:
    first = draws(np.arange(1000)).uniform("a", 1)
    others = [
        draws(np.arange(1000), seed=2).uniform("a", 1),
        draws(np.arange(1000), epoch=1).uniform("a", 1),
        draws(np.arange(1, 1001)).uniform("a", 1),
        draws(np.arange(1000)).uniform("b", 1),
        draws(np.arange(1000)).uniform("a", 2)[:, 1:],
        draws(np.arange(1000)).lasting("a", 1),
    ]
    for other in others:
        assert (first == other).sum() == 0
        # 5 std of 1000 unrelated pairs
        assert abs(_correlation(first[:, 0], other[:, 0])) < 0.16


def test_numbers_that_last_are_the_same_at_every_epoch() -> None:
    assert np.array_equal(
        draws([1, 2], epoch=0).lasting("a", 3), draws([1, 2], epoch=9).lasting("a", 3)
    )


@pytest.mark.parametrize("axis", ["samples", "columns", "epochs", "seeds"])
def test_uniform_and_unrelated_along_every_axis(axis: str) -> None:
    """Chi-squared of 64 bins, and of 16 x 16 bins of neighbours, against the uniform table: within
    5 std."""
    n = 40_000
    if axis == "samples":
        numbers = draws(np.arange(n)).uniform("x", 1)[:, 0]
    elif axis == "columns":
        numbers = draws([5]).uniform("x", n)[0]
    else:
        count = 4000
        keys = [(1, i) if axis == "epochs" else (i, 1) for i in range(count)]
        numbers = np.concatenate([draws([3], *key).uniform("x", 1)[0] for key in keys])
    assert numbers.min() >= 0 and numbers.max() < 1
    _looks_uniform(np.histogram(numbers, 64, (0, 1))[0])
    _looks_uniform(np.histogram2d(numbers[:-1], numbers[1:], 16, ((0, 1), (0, 1)))[0])


def test_take_keeps_rows_with_their_samples() -> None:
    whole = Draws(1, 2, np.arange(6), (np.arange(12.0).reshape(6, 2),))
    some = whole.take([4, 1])
    assert some.samples.tolist() == [4, 1]
    assert some.parameters[0].tolist() == [[8, 9], [2, 3]]
    assert np.array_equal(some.uniform("a", 2), whole.uniform("a", 2)[[4, 1]])


def test_draws_pickle() -> None:
    whole = Draws(1, 2, np.arange(6), (np.ones((6, 2)),))
    copy = pickle.loads(pickle.dumps(whole))
    assert np.array_equal(copy.uniform("a", 2), whole.uniform("a", 2))


def test_no_samples_no_numbers() -> None:
    assert draws([]).uniform("a", 4).shape == (0, 4)


def _looks_uniform(counts: Floats) -> None:
    expected = counts.sum() / counts.size
    chi_squared, freedom = ((counts - expected) ** 2 / expected).sum(), counts.size - 1
    assert abs(chi_squared - freedom) < 5 * (2 * freedom) ** 0.5


def _correlation(a: Floats, b: Floats) -> float:
    return float(np.corrcoef(a, b)[0, 1])


def test_every_kind_of_integer_draws_the_same() -> None:
    plain = draws([4, 5], 3, 2)
    numpys = draws([4, 5], np.int64(3), np.uint8(2))  # type: ignore[arg-type]
    _key.cache_clear()
    expected = plain.uniform("a", 3)
    _key.cache_clear()
    assert np.array_equal(numpys.uniform("a", 3), expected)
