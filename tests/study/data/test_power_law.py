"""The fit of a power law, against closed forms and a slow search over a fine grid."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allstep.study.data.power_law import EXPONENTS, Floats, fit_power_law

SIZES = np.array([500.0, 1000, 2000, 4000, 8000, 16000, 60000])


def slow(n: Floats, e: Floats, s: Floats, with_floor: bool) -> float:
    """Return the smallest chi-squared over ever finer grids of b.

    For each b every subset of c and a is set to 0.
    """
    low, high = EXPONENTS[0], EXPONENTS[-1]
    for _ in range(3):
        chi2 = {b: of_exponent(b, n, e, s, with_floor) for b in np.linspace(low, high, 300)}
        best, step = min(chi2, key=lambda b: chi2[b]), (high - low) / 299
        low, high = max(low, best - step), min(high, best + step)
    return chi2[best]


def of_exponent(b: float, n: Floats, e: Floats, s: Floats, with_floor: bool) -> float:
    best = np.inf
    for columns in ([0, 1], [0], [1]) if with_floor else ([1],):
        rows = np.stack([np.ones_like(n), n**-b], axis=1)[:, columns] / s[:, None]
        found = np.linalg.lstsq(rows, e / s, rcond=None)[0]
        if (found >= 0).all():
            best = min(best, float(((rows @ found - e / s) ** 2).sum()))
    return best


@pytest.mark.parametrize("with_floor", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_no_finer_grid_is_nearer(seed: int, with_floor: bool) -> None:
    rng = np.random.default_rng(seed)
    count = int(rng.integers(4, 8))
    s = rng.uniform(0.002, 0.02, count)
    e = (
        rng.uniform(0, 0.05)
        + 2 * SIZES[:count] ** -rng.uniform(0.1, 0.6)
        + s * rng.normal(size=count)
    )
    found = fit_power_law(SIZES[:count], e, s, with_floor)
    reference = slow(SIZES[:count], e, s, with_floor)
    assert found.chi2[0] == pytest.approx(reference, rel=1e-3, abs=1e-3)
    assert found.chi2[0] <= reference + 1e-9
    # chi-squared is that of the law that is returned
    distances = (e - [float(found.law(n)[0]) for n in SIZES[:count]]) / s
    assert (distances**2).sum() == pytest.approx(found.chi2[0], rel=1e-6, abs=1e-9)
    assert found.law.floor[0] >= 0 and found.law.factor[0] >= 0


@settings(max_examples=40, deadline=None)
@given(c=st.floats(0, 0.2), a=st.floats(0.5, 20), b=st.floats(0.06, 1.4))
def test_points_without_noise_give_their_law(c: float, a: float, b: float) -> None:
    e = c + a * SIZES**-b
    law = fit_power_law(SIZES, e, 0.01 * e, True).law
    for n in (1000.0, 60_000.0, 600_000.0):
        assert law(n)[0] == pytest.approx(c + a * n**-b, rel=1e-3)
    assert law.needed(c + a * 120_000.0**-b)[0] == pytest.approx(120_000, rel=0.05)


def test_a_constant_and_a_law_without_floor_are_on_the_edges() -> None:
    flat = fit_power_law(SIZES, np.full(7, 0.1), np.full(7, 0.01), True)
    assert flat.chi2[0] == pytest.approx(0, abs=1e-9)
    assert flat.law(6e5)[0] == pytest.approx(0.1, rel=1e-6)
    pure = 2 * SIZES**-0.3
    for with_floor in (True, False):
        law = fit_power_law(SIZES, pure, 0.01 * pure, with_floor).law
        assert law.exponent[0] == pytest.approx(0.3, abs=1e-4)
        assert law.floor[0] == pytest.approx(0, abs=1e-4)
    # c would be negative: a line in log-log that bends down
    bent = 2 * SIZES**-0.3 - 0.05
    assert fit_power_law(SIZES, bent, 0.01 * bent, True).law.floor[0] == 0


def test_many_curves_at_once_are_as_one_at_a_time() -> None:
    rng = np.random.default_rng(3)
    s = np.full(7, 0.004)
    curves = 0.03 + 2 * SIZES**-0.4 + s * rng.normal(size=(20, 7))
    together = fit_power_law(SIZES, curves, s, True)
    for i, curve in enumerate(curves):
        alone = fit_power_law(SIZES, curve, s, True)
        # many are not refined between the exponents of the grid
        assert alone.chi2[0] <= together.chi2[i] + 1e-9
        assert together.chi2[i] == pytest.approx(alone.chi2[0], rel=0.02, abs=0.02)
        assert together.law(6e4)[i] == pytest.approx(alone.law(6e4)[0], rel=0.01)


def test_what_the_floor_does_not_permit_needs_infinitely_many() -> None:
    law = fit_power_law(SIZES, 0.05 + 3 * SIZES**-0.5, np.full(7, 0.001), True).law
    assert law.needed(0.05 - 1e-3)[0] == np.inf
    assert law.needed(0.06)[0] == pytest.approx((3 / 0.01) ** 2, rel=0.02)
