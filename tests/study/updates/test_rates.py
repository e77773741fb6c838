"""The search for a rate, against trying all of them."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allstep.study.updates.lr_steps import next_step, rate


def search(cost: dict[int, float], most: int, diverges_from: int | None = None) -> list[int]:
    """The steps that are tried; `cost` is infinite where it says nothing."""
    scores: dict[int, float] = {}
    while True:
        diverged = [k for k in scores if diverges_from is not None and k >= diverges_from]
        k = next_step(scores, most, min(diverged, default=None))
        if k is None:
            return list(scores)
        scores[k] = cost.get(k, math.inf)


@settings(max_examples=50)
@given(st.integers(-8, 8), st.floats(0.1, 3))
def test_a_valley_is_followed_to_its_bottom(bottom: int, steepness: float) -> None:
    cost = {k: 100 + steepness * abs(k - bottom) for k in range(-20, 20)}
    tried = search(cost, most=20)
    assert min(tried, key=lambda k: cost[k]) == bottom
    assert (
        len(tried) <= abs(bottom) + 3
    )  # from the first to the bottom, both neighbours, and one in the wrong direction


def test_at_most_so_many() -> None:
    assert search({k: 100.0 - k for k in range(20)}, most=6) == [0, 1, 2, 3, 4, 5]
    assert search({}, most=1) == [0]


def test_without_success_it_looks_on_both_sides() -> None:
    assert search({}, most=5) == [0, 1, -1, 2, -2]
    assert search({-2: 50.0, -3: 60.0}, most=8) == [0, 1, -1, 2, -2, -3]


def test_nothing_is_tried_beyond_a_rate_that_diverged() -> None:
    assert search({0: 10.0}, most=6, diverges_from=1) == [0, 1, -1]
    assert search({-2: 10.0, -3: 5.0}, most=6, diverges_from=-1) == [0, -1, -2, -3, -4]


@pytest.mark.parametrize(
    ("first", "k", "expected"), [(0.1, 0, 0.1), (0.1, 3, 0.8), (0.1, -2, 0.025), (1 / 3, 0, 0.333)]
)
def test_rates(first: float, k: int, expected: float) -> None:
    assert rate(first, k) == expected
