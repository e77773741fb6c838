"""The rule of shares by speed, on simulated workers: no oscillation, equal workers stay equal."""

import random
from collections.abc import Callable, Sequence
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allstep.data.order import Weights, even, lengths
from allstep.train.step.speed_rule import EVERY, SpeedRule

FIXED, PER_SAMPLE = 0.003, 0.001
"""Seconds of a step that do not depend on its samples, and seconds of a sample."""


class Simulation:
    """Workers that need `slowness[r]` times as long as usual for their work.

    `noise` is the relative std of each time. `changes` has the step and the new weights of each
    change, `seconds` the duration of each step.
    """

    def __init__(
        self, batch: int, size: int, *, min_samples: int = 1, noise: float = 0.0, seed: int = 0
    ) -> None:
        self.batch, self.rule = batch, SpeedRule(size, min_samples)
        self.random, self.noise = random.Random(seed), noise
        self.seconds: list[float] = []
        self.changes: list[tuple[int, Weights]] = []

    @property
    def counts(self) -> list[int]:
        return lengths(self.batch, self.rule.weights)

    def run(self, num_steps: int, slowness: Sequence[float]) -> "Simulation":
        for _ in range(num_steps):
            counts = self.counts
            times = [
                slow * (FIXED + PER_SAMPLE * count) * self._chance()
                for slow, count in zip(slowness, counts, strict=True)
            ]
            self.seconds.append(max(times))
            weights = self.rule.add(times, counts, self.batch)
            if weights is not None:
                self.changes.append((len(self.seconds), weights))
        return self

    def _chance(self) -> float:
        return max(0.3, self.random.gauss(1.0, self.noise)) if self.noise else 1.0


def even_seconds(batch: int, slowness: Sequence[float]) -> float:
    return max(slowness) * (FIXED + PER_SAMPLE * batch / len(slowness))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("slowness", "batch", "gain"), [((1, 2), 32, 1.33), ((1, 1, 1, 2), 128, 1.5), ((1, 5), 64, 2.2)]
)
def test_a_slow_worker_costs_less_from_step_100_on(
    slowness: Sequence[float], batch: int, gain: float, seed: int
) -> None:
    """The issue asks for 1.3 with 2 workers, where 1.45 to 1.5 are ideal; noise takes a part."""
    ran = Simulation(batch, len(slowness), noise=0.1, seed=seed).run(300, slowness)
    base = Simulation(batch, len(slowness), noise=0.1, seed=seed)
    base.rule.add = lambda *args: None  # type: ignore[method-assign]
    assert fmean(base.run(300, slowness).seconds[100:]) / fmean(ran.seconds[100:]) > gain


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("size", "batch"), [(2, 32), (2, 4096), (4, 1000), (8, 256)])
def test_equal_workers_stay_equal(size: int, batch: int, seed: int) -> None:
    """With 10% noise in each time: seldom a change, and none by more than a few percent."""
    ran = Simulation(batch, size, noise=0.1, seed=seed).run(1000, [1.0] * size)
    assert len(ran.changes) <= 12
    for _, weights in ran.changes:
        usual = sum(weights) / size
        assert max(abs(each - usual) for each in weights) <= max(1, 0.06 * usual)


def test_the_shares_return_to_even_when_the_cause_is_gone() -> None:
    ran = Simulation(32, 2).run(400, (1, 2))
    assert ran.counts == [22, 10]
    ran.run(120, (1, 1))
    assert max(ran.counts) <= 17
    ran.run(40, (1, 1))
    assert ran.rule.weights == (1, 1)


@pytest.mark.parametrize("seed", range(5))
def test_they_return_with_noise_too(seed: int) -> None:
    ran = Simulation(32, 2, noise=0.1, seed=seed).run(400, (1, 2))
    assert ran.counts[1] <= 12
    ran.run(120, (1, 1))
    assert max(ran.counts) <= 18


@settings(deadline=None, max_examples=60)
@given(slow=st.floats(1, 20), batch=st.integers(8, 600), min_samples=st.sampled_from([1, 2, 4]))
def test_two_workers_move_in_one_direction_and_then_rest(
    slow: float, batch: int, min_samples: int
) -> None:
    """Reference: the best of all splits, of which at most a sample and 5% are left."""
    ran = Simulation(batch, 2, min_samples=min_samples).run(700, (1, slow))
    mine = [lengths(batch, weights)[1] for _, weights in ran.changes]
    assert mine == sorted(mine, reverse=True)
    assert len(set(ran.seconds[-100:])) == 1
    splits = range(min_samples, batch - min_samples + 1)
    best = min(
        max(FIXED + PER_SAMPLE * (batch - k), slow * (FIXED + PER_SAMPLE * k)) for k in splits
    )
    assert ran.seconds[-1] <= 1.05 * best + slow * PER_SAMPLE
    assert ran.seconds[-1] <= even_seconds(batch, (1, slow)) + slow * PER_SAMPLE


@settings(deadline=None, max_examples=60)
@given(
    data=st.data(),
    size=st.integers(1, 6),
    batch=st.integers(1, 300),
    min_samples=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_whatever_the_times_the_shares_are_valid_and_change_slowly(
    data: st.DataObject, size: int, batch: int, min_samples: int, seed: int
) -> None:
    times = st.floats(0, 1e3) | st.sampled_from([0.0, 1e-9])
    ran = Simulation(batch, size, min_samples=min_samples, noise=0.3, seed=seed)
    before = ran.counts
    for _ in range(data.draw(st.integers(1, 6))):
        ran.run(EVERY, [data.draw(times) for _ in range(size)])
        counts = ran.counts
        assert sum(counts) == batch
        if ran.rule.weights != even(size):
            assert min(counts) >= min_samples
        for count, was in zip(counts, before, strict=True):
            assert abs(count - was) <= 0.2 * was + 2
        before = counts


def test_all_ranks_decide_alike() -> None:
    """They add the same numbers, so the rule must not use anything else."""
    first, second = (Simulation(64, 3, noise=0.2, seed=7).run(200, (1, 3, 1)) for _ in range(2))
    assert first.changes == second.changes != []


def no_samples(step: int) -> Sequence[int]:
    return (32, 0)


def few_samples(step: int) -> Sequence[int]:
    return (16, 16) if step % 3 == 0 else (32, 0)


@pytest.mark.parametrize("samples", [no_samples, few_samples])
def test_a_worker_whose_speed_is_not_known_keeps_its_share(
    samples: Callable[[int], Sequence[int]],
) -> None:
    rule = SpeedRule(2)
    assert not any(rule.add((0.1, 0.9), samples(step), 32) for step in range(200))


def test_pauses_change_nothing() -> None:
    """A step in four takes ten times as long on one worker."""
    rule = SpeedRule(2)
    for step in range(400):
        slow = 10.0 if step % 4 == 0 else 1.0
        assert rule.add((0.016, 0.016 * slow), (16, 16), 32) is None


def test_a_growing_batch_keeps_the_parts() -> None:
    ran = Simulation(32, 2).run(400, (1, 2))
    assert ran.counts == [22, 10]
    ran.batch = 320
    assert ran.counts == [220, 100]
    ran.run(200, (1, 2))
    assert 205 <= ran.counts[0] <= 220
