"""What a learning curve says, on drawn curves whose law is known."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allstep.study.data.learning_curve import Curve, Points, pooled_spreads, refusal, self_check

WHOLE = 64_000.0
SIZES = tuple(WHOLE / 2**k for k in range(7, -1, -1))


def drawn(
    rng: np.random.Generator, c: float, a: float, b: float, noise: float, sizes: tuple[float, ...]
) -> Points:
    truth = c + a * np.asarray(sizes) ** -b
    errors = truth * (1 + noise * rng.normal(size=len(sizes)))
    return Points(sizes, tuple(errors.tolist()), tuple((noise * truth).tolist()))


def exact(c: float, a: float, b: float, noise: float = 0.01) -> Points:
    truth = [c + a * n**-b for n in SIZES]
    return Points(SIZES, tuple(truth), tuple(noise * each for each in truth))


@pytest.mark.parametrize("has_floor", [False, True], ids=["no floor", "floor"])
def test_the_band_covers_known_curves_as_often_as_it_claims(has_floor: bool) -> None:
    """A 90% band of 100 curves, at 4 and 16 times the largest size, with 2% noise.

    Fewer than 80 would claim too much, more than 97 too little.
    """
    rng, sizes = np.random.default_rng(11), SIZES[:6]
    covered, at = 0, (4 * sizes[-1], 16 * sizes[-1])
    for i in range(100):
        c = rng.uniform(0.02, 0.12) if has_floor else 0.0
        b = rng.uniform(0.1, 0.6)
        a = rng.uniform(0.1, 0.3) * sizes[0] ** b
        found = Curve(drawn(rng, c, a, b, 0.02, sizes)).predict(at[i % 2])
        covered += found.low <= c + a * at[i % 2] ** -b <= found.high
    assert 80 <= covered <= 97


def test_the_band_covers_where_the_noise_is_estimated_from_two_seeds() -> None:
    """The noise of the seed is 4% here, which the binomial one of 5,000 samples does not have."""
    rng, sizes, covered = np.random.default_rng(5), SIZES[:6], 0
    for _ in range(50):
        b = rng.uniform(0.1, 0.5)
        a, c = rng.uniform(0.1, 0.3) * sizes[0] ** b, rng.uniform(0, 0.06)
        truth = c + a * np.asarray(sizes) ** -b
        seen = rng.binomial(5000, truth[:, None] * (1 + 0.04 * rng.normal(size=(6, 2)))) / 5000
        spreads, freedom = pooled_spreads(seen.tolist(), 5000)
        points = Points(sizes, tuple(seen.mean(axis=1).tolist()), spreads, freedom)
        found = Curve(points).predict(4 * sizes[-1])
        covered += found.low <= c + a * (4 * sizes[-1]) ** -b <= found.high
    assert covered >= 40


def test_a_flat_and_a_rising_curve_are_refused() -> None:
    rng = np.random.default_rng(0)
    flat = [refusal(drawn(rng, 0.1, 0, 0.5, 0.03, SIZES)) for _ in range(40)]
    assert sum(map(bool, flat)) >= 37
    assert all("does not fall by more than its spread: " in each for each in flat if each)
    rising = Points(SIZES, tuple(0.1 + 0.01 * k for k in range(8)), (0.003,) * 8)
    expected = "the error rises, from 10.00% with 500 samples to 17.00% with 64,000"
    assert refusal(rising) == expected
    # falls, and then rises with the largest size: no law describes the next
    turned = exact(0.02, 2, 0.3)
    assert not refusal(turned)
    errors = (*turned.errors[:-1], turned.errors[3])
    assert refusal(Points(SIZES, errors, turned.spreads)).startswith("the error rises, from ")


def test_too_few_sizes_are_refused() -> None:
    points = exact(0.02, 2, 0.3)
    assert refusal(points.first(3)) == "a curve needs at least 4 sizes with a result, found 3"
    assert refusal(points.first(4)) == ""
    assert "found 0" in refusal(Points((), (), ()))


def test_both_laws_are_shown_where_the_points_do_not_separate_them() -> None:
    """The same law, measured well and badly."""
    well, badly = exact(0.05, 3, 0.5, 0.002), exact(0.05, 3, 0.5, 0.3)
    assert Curve(well).is_separated and len(Curve(well).laws) == 1
    assert Curve(well).floor.value == pytest.approx(0.05, rel=0.01)
    found = Curve(badly).predict(10 * WHOLE)
    assert not Curve(badly).is_separated and len(found.by_law) == 2
    assert found.value == pytest.approx(sum(found.by_law) / 2)
    for value in found.by_law:
        assert found.low <= value <= found.high
    narrow = Curve(well).predict(10 * WHOLE)
    assert narrow.high - narrow.low < 0.1 * (found.high - found.low)


@settings(max_examples=10, deadline=None)
@given(factor=st.floats(0.01, 100), seed=st.integers(0, 99))
def test_another_unit_of_samples_changes_nothing(factor: float, seed: int) -> None:
    points = drawn(np.random.default_rng(seed), 0.03, 2, 0.35, 0.02, SIZES)
    scaled = Points(tuple(n * factor for n in SIZES), points.errors, points.spreads)
    ours, theirs = Curve(points).predict(2 * WHOLE), Curve(scaled).predict(2 * WHOLE * factor)
    assert ours.value == pytest.approx(theirs.value, rel=1e-6)
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), rel=1e-6)


def test_the_same_points_give_the_same_band() -> None:
    points = exact(0.02, 2, 0.3)
    assert Curve(points).predict(WHOLE) == Curve(points).predict(WHOLE)


def test_points_that_no_law_fits_widen_the_band_if_their_noise_is_estimated() -> None:
    base = exact(0.02, 2, 0.3)
    errors = tuple(e * (1.08 if i % 2 else 0.92) for i, e in enumerate(base.errors))
    known, estimated = (Points(SIZES, errors, base.spreads, freedom) for freedom in (0, 8))
    narrow, wide = (Curve(each).predict(4 * WHOLE) for each in (known, estimated))
    assert wide.high - wide.low > 3 * (narrow.high - narrow.low)


def test_the_largest_size_is_predicted_without_it() -> None:
    """A changed largest error must not change its own prediction."""
    points = exact(0.02, 2, 0.3)
    checks = self_check(points)
    assert [check.up_to for check in checks] == [32_000, 16_000, 8_000, 4_000]
    for check in checks:
        assert check.measured == points.errors[-1]
        assert abs(check.off) < 0.05 and check.is_inside
    other = Points(SIZES, (*points.errors[:-1], 0.9 * points.errors[-1]), points.spreads)
    assert [each.predicted for each in self_check(other)] == [each.predicted for each in checks]
    assert self_check(other)[0].off == pytest.approx((1 + checks[0].off) / 0.9 - 1)
    assert self_check(points.first(4)) == []


def test_spreads_by_hand() -> None:
    spreads, freedom = pooled_spreads([[0.2], [0.1]], 1000)
    assert spreads == pytest.approx([math.sqrt(0.2 * 0.8 / 1000), math.sqrt(0.1 * 0.9 / 1000)])
    assert freedom == 1
    errors = [[0.2, 0.22], [0.1, 0.1], [0.05]]
    by_seed = math.log(0.22 / 0.2) ** 2 / 2 / 2
    spreads, freedom = pooled_spreads(errors, 1000)
    assert freedom == 2
    assert spreads[0] == pytest.approx(math.sqrt(0.21 * 0.79 / 1000 + by_seed * 0.21**2 / 2))
    assert spreads[2] == pytest.approx(math.sqrt(0.05 * 0.95 / 1000 + by_seed * 0.05**2))
    # no error and nothing but errors: still a spread, which is a weight
    assert all(each > 0 for each in pooled_spreads([[0.0, 0.0], [1.0]], 100)[0])
