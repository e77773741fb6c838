"""The noise scale on a problem where it is known: samples x ~ N(mu, diag(s^2)), loss |w - x|^2 / 2,
so G = w - mu and Sigma = diag(s^2)."""

import json
import math
from dataclasses import asdict

import numpy as np
import pytest
import torch

from allstep.errors import ConfigError
from allstep.optim import Estimate, RunningNoiseScale, advice, estimate, from_workers, measure

DEVIATIONS = np.linspace(0.5, 3.0, 20)
TRUE_G = np.linspace(-0.4, 0.6, 20)
GRADIENT_SQ, NOISE = float((TRUE_G**2).sum()), float((DEVIATIONS**2).sum())
SCALE = NOISE / GRADIENT_SQ  # about 34 samples


def steps(count: int, shares: list[int], seed: int = 0, gradient: float = 1.0) -> list[Estimate]:
    """Estimates of this many steps with these samples per worker.

    The mean of b samples is drawn as one normal number, which it is.
    """
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        each = [
            (
                gradient * TRUE_G + rng.normal(size=20) * DEVIATIONS / math.sqrt(b)
                if b
                else np.zeros(20)
            )
            for b in shares
        ]
        mean = sum(g * b for g, b in zip(each, shares, strict=True)) / sum(shares)
        found.append(from_workers([float(g @ g) for g in each], shares, float(mean @ mean)))
    return found


@pytest.mark.parametrize("shares", [[8, 8], [2, 5, 0, 9], [1, 1, 1, 1]], ids=str)
def test_unbiased(shares: list[int]) -> None:
    """The mean of many estimates, within four standard errors of the truth; workers may differ, or
    have nothing."""
    found = steps(3000, shares)
    for values, truth in (
        ([each.gradient_sq for each in found], GRADIENT_SQ),
        ([each.noise for each in found], NOISE),
    ):
        error = np.std(values) / math.sqrt(len(values))
        assert abs(np.mean(values) - truth) < 4 * error
        assert error < 0.1 * truth


def test_without_noise_in_the_norms() -> None:
    found = estimate(GRADIENT_SQ + NOISE / 8, 8, GRADIENT_SQ + NOISE / 64, 64)
    assert (found.gradient_sq, found.noise) == pytest.approx((GRADIENT_SQ, NOISE))


def test_the_running_estimate_knows_how_sure_it_is() -> None:
    """Of 95% intervals at least 88% hold the truth, and they become narrow."""
    hits = 0
    for seed in range(150):
        running = RunningNoiseScale(decay=0.98)
        for found in steps(120, [8, 8], seed):
            running.add(found)
        low, high = running.interval()
        hits += low <= SCALE <= high
    assert hits >= 0.88 * 150
    wide = RunningNoiseScale(decay=1.0)
    for found in steps(3000, [16, 16]):
        wide.add(found)
    low, high = wide.interval()
    assert low < SCALE < high < 1.3 * low
    assert wide.scale == pytest.approx(SCALE, rel=0.1)


def test_against_plain_means() -> None:
    """With decay 1 the running values are numpy's; with decay they are numpy's weighted ones."""
    found = steps(50, [4, 4])
    for decay in (1.0, 0.9):
        running = RunningNoiseScale(decay)
        for each in found:
            running.add(each)
        w = decay ** np.arange(49, -1, -1)
        pairs = np.array([[each.gradient_sq, each.noise] for each in found])
        mean = (w[:, None] * pairs).sum(0) / w.sum()
        spread = ((pairs - mean) * w[:, None]).T @ (pairs - mean)
        assert (running.gradient_sq, running.noise) == pytest.approx(tuple(mean))
        kept = [
            [running.spread_gradient_sq, running.spread_both],
            [running.spread_both, running.spread_noise],
        ]
        np.testing.assert_allclose(kept, spread, rtol=1e-9)
    assert running.steps == 50


def test_lost_in_noise() -> None:
    """No gradient at all: the upper end stays infinite, and the advice says so."""
    running = RunningNoiseScale()
    assert running.interval() == (0.0, math.inf)
    assert running.advice(64).startswith("noise scale not known yet")
    for found in steps(300, [4, 4], gradient=0.0):
        running.add(found)
    low, high = running.interval()
    assert high == math.inf
    assert low > 64
    assert "at least" in running.advice(
        64
    ) and "Larger batches may help; measure over more steps." in running.advice(64)


def test_it_survives_a_checkpoint() -> None:
    running = RunningNoiseScale()
    for found in steps(10, [4, 4]):
        running.add(found)
    again = RunningNoiseScale(**json.loads(json.dumps(asdict(running))))
    assert again == running
    assert again.interval() == running.interval()


def test_micro_batches_on_one_worker() -> None:
    """Gradients as backward() of the whole batch gives, and the estimate as from the norms of the
    parts."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1)
    ).double()
    unused = torch.nn.Parameter(torch.zeros(2))
    data = torch.randn(12, 4, dtype=torch.float64)
    parts = data.split([3, 4, 5])
    found = measure(
        [*model.parameters(), unused], ((model(part).square().mean(), len(part)) for part in parts)
    )
    ours = [param.grad.clone() for param in model.parameters()]
    norms_sq = []
    for part in (*parts, data):
        model.zero_grad()
        model(part).square().mean().backward()
        norms_sq.append(sum(float(param.grad.square().sum()) for param in model.parameters()))
    for mine, param in zip(ours, model.parameters(), strict=True):
        torch.testing.assert_close(mine, param.grad, rtol=1e-12, atol=1e-12)
    expected = from_workers(norms_sq[:3], [3, 4, 5], norms_sq[3])
    assert (found.gradient_sq, found.noise) == pytest.approx((expected.gradient_sq, expected.noise))
    measure(model.parameters(), ((model(part).square().mean(), len(part)) for part in parts))
    torch.testing.assert_close(next(model.parameters()).grad, 2 * ours[0])


def test_advice() -> None:
    assert (
        advice(1000, 1000.0, 800.0, 1200.0)
        == "noise scale about 1000 samples (95%: 800 to 1200); batch 1000 needs 2 times the fewest"
        " updates and 2 times the fewest samples. It is near the critical batch: a fair trade of"
        " time for samples. Twice the batch would save 25% of the updates."
    )
    assert "There is room for a larger batch. Twice the batch would save 48%" in advice(
        32, 1000.0, 800.0, 1200.0
    )
    assert "past the critical batch" in advice(8192, 1000.0, 800.0, 1200.0)
    assert "no noise at all" in advice(8, 0.0, 0.0, 1.0)


def test_what_is_refused() -> None:
    with pytest.raises(ConfigError, match="not of 8 and 8 samples"):
        estimate(1.0, 8, 1.0, 8)
    with pytest.raises(ConfigError, match="there is 1: split the batch into micro-batches"):
        from_workers([1.0, 0.0], [8, 0], 1.0)
    with pytest.raises(ConfigError, match="decay=0"):
        RunningNoiseScale(decay=0.0)
    with pytest.raises(ConfigError, match="batch 0"):
        advice(0, 1.0, 1.0, 1.0)


@pytest.mark.parametrize("bad", [Estimate(math.nan, 1.0), Estimate(1.0, math.inf)], ids=str)
def test_a_step_that_was_not_finite_spoils_no_other(bad: Estimate) -> None:
    clean, spoiled = RunningNoiseScale(), RunningNoiseScale()
    spoiled.add(bad)
    for found in steps(20, [8, 8]):
        clean.add(found)
        spoiled.add(found)
        spoiled.add(bad)
    assert spoiled == clean
