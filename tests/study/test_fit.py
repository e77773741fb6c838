"""S = Smin + Emin / B, against closed forms, a fine grid, and the published points."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allstep.study.fit import fit
from allstep.study.updates.published import PUBLISHED

BATCHES = [32, 128, 512, 2048, 8192]


@pytest.mark.parametrize(
    ("fewest_updates", "fewest_samples"), [(150, 46_000), (0, 50_000), (300, 0), (1e-3, 1e9)]
)
def test_exact_points_give_the_curve_back(fewest_updates: float, fewest_samples: float) -> None:
    found = fit(BATCHES, [fewest_updates + fewest_samples / batch for batch in BATCHES])
    assert found is not None
    assert found.fewest_updates == pytest.approx(fewest_updates, rel=1e-6, abs=1e-6)
    assert found.fewest_samples == pytest.approx(fewest_samples, rel=1e-6, abs=1e-6)
    assert found.rms < 1e-9
    assert found(256) == pytest.approx(fewest_updates + fewest_samples / 256)


def test_three_points_by_hand() -> None:
    """With Emin at its edge, 0, the closed form for Smin is sum(1/S) / sum(1/S^2): rising points
    ask for that."""
    found = fit([100, 200, 400], [10, 20, 40])
    assert found is not None and found.fewest_samples == 0
    assert found.fewest_updates == pytest.approx(
        (1 / 10 + 1 / 20 + 1 / 40) / (1 / 100 + 1 / 400 + 1 / 1600)
    )
    assert found.critical_batch == 0


def test_the_published_points() -> None:
    """Against the fit of Fashion-MNIST in our notes:

    Smin 154, Emin 46.7k, critical batch 304, rms 8.5%.
    """
    points = {
        batch: updates for batch, updates in PUBLISHED["fashion-mnist"].points.items() if batch >= 8
    }
    found = fit(list(points), list(points.values()))
    assert found is not None
    assert found.fewest_updates == pytest.approx(154, rel=0.05)
    assert found.fewest_samples == pytest.approx(46_700, rel=0.1)
    assert found.rms == pytest.approx(0.085, abs=0.03)


@pytest.mark.parametrize("updates", [[100, 200, 400], [4000, 900, 200], [50, 50, 50]])
def test_neither_term_is_negative(updates: list[float]) -> None:
    found = fit([32, 128, 512], updates)
    assert found is not None
    assert found.fewest_updates >= 0 and found.fewest_samples >= 0
    if found.fewest_updates == 0:
        assert found.critical_batch == float("inf")


def test_two_batches_are_no_curve() -> None:
    assert fit([], []) is None
    assert fit([128, 256, 128], [100, 80, 120]) is None


@settings(max_examples=30)
@given(st.lists(st.tuples(st.sampled_from(BATCHES), st.floats(10, 10_000)), min_size=3, max_size=6))
def test_nothing_is_better(points: list[tuple[int, float]]) -> None:
    """Against every point of a grid over both terms."""
    batches, updates = (np.array(each, float) for each in zip(*points, strict=True))
    found = fit(list(batches), list(updates))
    if found is None:
        return
    small = np.concatenate([[0], np.geomspace(1, 20_000, 60)])
    curves = small[:, None, None] + (small * 32)[None, :, None] / batches
    best = np.sqrt((((curves / updates) - 1) ** 2).mean(axis=2)).min()
    assert found.rms <= best + 1e-9
