"""Predictions from a calibration: properties of profile, parts and fits."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allstep.costs.speed import Speed
from allstep.errors import ConfigError
from allstep.plan.calibration import (
    Calibration,
    HostsTimes,
    HostTimes,
    StepTimes,
    fixed_part,
    on_line,
    per_sample,
    profile_at,
)
from allstep.plan.calibration_file import read_calibration, to_json
from allstep.plan.knowledge import connection, measured_parts
from allstep.plan.prediction import PARTS, Question, checks, cluster_of, fitted, knowledge, predict

LINK = Speed(25e-6, 1.25e9, math.inf)
NBYTES = (1e5, 4e6, 2e6, 1e4)
FIXED, EACH = 0.01, 1e-4


def times(batch: int, factor: float = 1.0) -> StepTimes:
    compute = factor * (FIXED + EACH * batch)
    forward, backward = compute / 3, 2 * compute / 3
    ready = tuple(forward + backward * (1 - place / 4) for place in range(4))
    return StepTimes(batch, forward, backward, ready, 0.002, 1e-5 * batch, 0.02)


def calibration(*batches: int, **more: object) -> Calibration:
    steps = tuple(times(each) for each in batches or (32, 128))
    return replace(Calibration(NBYTES, steps, 60_000), **more)  # type: ignore[arg-type]


def a_host(factor: float = 1.1, together: float | None = None) -> HostTimes:
    sums = tuple((n, 2 * 30e-6 + n / 2e9) for n in (1e5, 1e6, 1e7))
    return HostTimes(2, times(64, factor), (), sums, together)


WITH_HOST = calibration(host=a_host(together=0.03))
questions = st.builds(
    Question,
    per_host=st.sampled_from([1, 2, 8]),
    batch=st.just(8192),
    link=st.builds(Speed, st.floats(1e-6, 1e-3), st.floats(1e7, 1e11), st.just(math.inf)),
)


# The profile


@given(st.integers(1, 4096))
def test_between_measured_sizes_a_profile_is_on_the_line(batch: int) -> None:
    found = profile_at(calibration(), batch)
    assert found.forward + found.backward == pytest.approx(FIXED + EACH * batch)


def test_the_line_gives_the_fixed_part_and_the_time_of_a_sample() -> None:
    assert fixed_part(calibration(32, 64, 256)) == pytest.approx(FIXED)
    assert per_sample(calibration(32, 64, 256)) == pytest.approx(EACH)


@given(
    st.lists(st.tuples(st.floats(1, 1e4), st.floats(1e-6, 1e3)), min_size=1, max_size=4),
    st.floats(0, 1e5),
)
def test_whatever_the_noise_no_time_is_negative(
    points: list[tuple[float, float]], x: float
) -> None:
    rising = sorted(dict(points).items())
    assert on_line(rising, x) >= 0
    # More samples than any measured do not take less time than the largest.
    assert on_line(rising, rising[-1][0] * 2) >= rising[-1][1]


def test_one_size_is_taken_in_proportion() -> None:
    found = profile_at(calibration(64), 32)
    assert found.forward + found.backward == pytest.approx(times(64).compute / 2)


# Predictions


def test_one_worker_takes_what_it_takes_alone() -> None:
    found = predict(WITH_HOST, knowledge(WITH_HOST), Question(2, batch=64), 1)
    assert found.seconds == pytest.approx(times(64).busy)
    assert found.parts["contention"] == found.parts["exposed"] == 0


@given(questions, st.integers(1, 512))
@settings(max_examples=30)
def test_parts_add_up_and_are_not_negative(question: Question, workers: int) -> None:
    found = predict(WITH_HOST, knowledge(WITH_HOST), question, workers)
    assert tuple(found.parts) == PARTS
    assert all(each >= -1e-12 for each in found.parts.values())
    assert found.samples_per_second * found.seconds == pytest.approx(8192)


@given(questions, st.integers(1, 512), st.floats(1, 10))
@settings(max_examples=30)
def test_a_faster_link_is_never_slower(question: Question, workers: int, factor: float) -> None:
    known = knowledge(WITH_HOST)
    before = predict(WITH_HOST, known, question, workers).seconds
    for change in ({"link_rate": factor}, {"latency": 1 / factor}, {"gradients": 1 / factor}):
        # The algorithm is chosen within 5% of the best, and may change.
        fixed = replace(question, algorithm="ring")
        slow = predict(WITH_HOST, known, fixed, workers).seconds
        assert predict(WITH_HOST, known, replace(fixed, **change), workers).seconds <= slow * 1.0001
    assert before > 0


def test_a_busy_host_is_slower_in_proportion_to_its_workers() -> None:
    known = measured_parts(calibration(host=a_host(1.2)))
    assert known.contention == pytest.approx(1.2)
    assert known.contention_of(1) == 1.0
    assert known.contention_of(2) == known.contention_of(8) == known.contention


def test_shared_weights_divide_update_and_sums_on_one_host() -> None:
    shared = replace(WITH_HOST, shares_weights=True)
    known, question = measured_parts(WITH_HOST), Question(2, batch=64, link=LINK)
    whole, part = (predict(each, known, question, 2).parts for each in (WITH_HOST, shared))
    assert part["update"] == pytest.approx(whole["update"] / 2)
    assert part["exposed"] < 0.7 * whole["exposed"]
    assert predict(shared, known, question, 4) == predict(WITH_HOST, known, question, 4)


def test_4096_workers_take_few_milliseconds() -> None:
    found = predict(WITH_HOST, knowledge(WITH_HOST), Question(8, batch=8192, link=LINK), 4096)
    assert found.hosts == 512
    assert found.parts["exposed"] > found.parts["compute"]


def test_workers_that_do_not_fill_their_hosts() -> None:
    cluster = cluster_of(knowledge(WITH_HOST), Question(8, batch=64, link=LINK), 12)
    assert (cluster.hosts, cluster.per_host) == (2, 6)


def test_the_slowest_worker_of_a_host_is_named() -> None:
    slow = replace(a_host(), workers=3, by_rank=(0.01, 0.01, 0.015))
    known = measured_parts(calibration(host=slow))
    assert (known.slow, known.slowest) == (pytest.approx(1.5), 2)


# Fits


@given(st.floats(0.013, 0.2))
@settings(max_examples=10)
def test_a_step_together_is_predicted_as_it_was_measured(seconds: float) -> None:
    measured = calibration(host=a_host(together=seconds))
    question = Question(2, batch_per_worker=64)
    assert predict(measured, knowledge(measured), question, 2).seconds == pytest.approx(
        seconds, rel=1e-3
    )


@given(st.floats(0.05, 0.5), st.booleans())
@settings(max_examples=10)
def test_a_step_over_hosts_is_predicted_as_it_was_measured(seconds: float, timed: bool) -> None:
    sums = ((1e6, 0.012), (6e6, 0.07)) if timed else ()
    measured = calibration(
        host=a_host(), hosts=HostsTimes(2, 2, Speed(1e-4, 1.2e8, 5e9), 64, sums, seconds)
    )
    known = knowledge(measured)
    assert known.level == 3
    assert known.checked == 4
    found = predict(measured, known, Question(2, batch_per_worker=64), 4).seconds
    # A link that was not timed is at most as fast as its nominal rate.
    is_at_limit = not timed and known.link is not None and known.link.bandwidth > 1.19e8
    assert found == pytest.approx(seconds, rel=0.01) or (is_at_limit and found > seconds)


def test_each_step_together_is_checked_without_itself() -> None:
    """A calibration that follows the formulas has checks without an error."""
    plain = calibration(host=a_host())
    exact = predict(plain, knowledge(plain), Question(2, batch_per_worker=64), 2).seconds
    made = calibration(host=a_host(together=exact))
    (found,) = checks(made)
    assert found.error == pytest.approx(0, abs=1e-6)
    (slow,) = checks(calibration(host=a_host(together=2 * exact)))
    assert slow.error == pytest.approx(-0.5, abs=1e-6)
    link = Speed(1e-4, 1.2e8, 5e9)
    over = HostsTimes(2, 2, link, 64, (), 1.0)
    both = checks(calibration(host=a_host(together=exact), hosts=over))
    assert [(each.workers, each.hosts) for each in both] == [(2, 1), (4, 2)]


def test_one_worker_measured_elsewhere_scales_the_computation() -> None:
    question = Question(2, batch=64)
    known = fitted(WITH_HOST, knowledge(WITH_HOST), question, 1, 0.1)
    assert predict(WITH_HOST, known, question, 1).seconds == pytest.approx(0.1, rel=1e-3)


@given(st.floats(1e-6, 1e-3), st.floats(1e8, 1e11), st.integers(2, 8))
def test_the_connection_of_a_host_is_found_from_its_sums(
    latency: float, rate: float, workers: int
) -> None:
    share, steps = 2 * (workers - 1) / workers, 2 * (workers - 1)
    sums = tuple((n, share * n / rate + steps * latency) for n in (1e4, 1e6, 1e8))
    found = connection(sums, workers)
    assert found.bandwidth == pytest.approx(rate, rel=1e-3)
    assert found.latency == pytest.approx(latency, rel=0.02)


def test_noisy_sums_still_give_a_connection() -> None:
    found = connection(((1e4, 1e-3), (1e6, 1e-4), (1e8, 1e-5)), 2)
    assert found.bandwidth > 0
    assert found.latency >= 0


# The file


def test_a_calibration_survives_its_file(tmp_path: Path) -> None:
    hosts = HostsTimes(2, 2, Speed(1e-4, 1.2e8, math.inf), 64, ((1e6, 0.012),), 0.1)
    made = replace(WITH_HOST, hosts=hosts, facts={"model": "lenet", "cores": 2})
    (tmp_path / "c.json").write_text(to_json(made))
    assert read_calibration(tmp_path / "c.json") == made


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("nbytes", [], "nbytes"),
        ("steps", "none", "steps"),
        ("steps", [], "steps"),
        ("num_train", 0.5, "num_train"),
        ("host", {"workers": 2}, "host.independent"),
        ("hosts", {"hosts": 2, "link": 3}, "hosts.link"),
        ("version", 7, "version"),
        ("kind", "other", "no calibration"),
    ],
)
def test_a_damaged_file_is_named_with_its_field(
    tmp_path: Path, field: str, value: object, named: str
) -> None:
    found = {**json.loads(to_json(WITH_HOST)), field: value}
    (tmp_path / "c.json").write_text(json.dumps(found))
    with pytest.raises(ConfigError, match=named):
        read_calibration(tmp_path / "c.json")


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_calibration(tmp_path / "none.json")
