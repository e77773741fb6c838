"""The rate of a run, by samples seen."""

import pytest

from allstep.train import read_config
from allstep.train.rate import learning_rate, peak_rate


def test_it_rises_to_its_peak_and_falls_to_nothing() -> None:
    config = read_config("digits", ["epochs=4", "schedule.warmup=1", "batch=64"])
    rate = learning_rate(config, 640)
    assert rate(0) == pytest.approx(0.05 / 10)  # the first step counts
    assert rate(640 - 64) == pytest.approx(0.05)
    assert rate(640 + 960) == pytest.approx(0.025)
    assert 0 < rate(4 * 640 - 64) < 0.001


def test_the_batch_changes_the_peak_and_not_the_shape() -> None:
    small, large = (read_config("digits", [f"batch={batch}", "schedule.warmup=0"]) for batch in (64, 256))
    assert peak_rate(large) == pytest.approx(4 * peak_rate(small))
    assert learning_rate(large, 1000)(5000) == pytest.approx(4 * learning_rate(small, 1000)(5000))


def test_a_run_that_is_shorter_than_its_warm_up_trains() -> None:
    assert learning_rate(read_config("digits", ["epochs=1", "schedule.warmup=5"]), 640)(300) > 0
