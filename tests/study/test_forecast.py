"""Forecasts: of a made-up study whose times are known."""

from itertools import product

import pytest

from allstep.runlog import RunRecord
from allstep.study.forecast import Forecast, in_lanes, measured
from allstep.study.trial import Outcome, Trial


def record(seconds: float, done: float, ended: bool = False) -> RunRecord:
    """Starts at 100; 2 s later it has done a tenth, and `done` after so many seconds more."""
    start = {"time": 100.0, "data": {"train": 1000}}
    steps = (
        {"time": 102.0, "samples": 400},
        {"time": 102.0 + seconds, "samples": 400 + int(done * 4000)},
    )
    return RunRecord(
        starts=(start,), steps=steps, ends=({"time": 103.0 + seconds},) if ended else ()
    )


def trial(name: str, seconds: float = 10.0) -> Trial:
    return Trial(name, ("true",), seconds=seconds, epochs=4)


def test_the_pace_is_that_of_the_work_done() -> None:
    forecast = Forecast()
    assert forecast.pace is None
    forecast.learn(trial("a"), record(3.0, 0.15))
    assert forecast.pace is None  # too little
    forecast.learn(trial("a"), record(8.0, 0.4))
    assert forecast.pace == pytest.approx(2.0)
    assert forecast.left(trial("a"), record(8.0, 0.4)) == pytest.approx(10.0)
    assert forecast.left(trial("b", 30.0)) == pytest.approx(60.0)
    forecast.learn(trial("a"), record(24.0, 0.8), since=95.0)
    assert forecast.left(trial("b", 30.0)) == pytest.approx(
        90.0 + 7.0
    )  # and until the first steps are done
    forecast.learn_end(trial("a"), record(27.0, 0.9, ended=True), wall=37.0)
    assert forecast.left(trial("b", 30.0)) == pytest.approx(90.0 + 10.0)  # and after the last ones


def test_a_run_that_ends_early_counts_for_what_it_did() -> None:
    forecast = Forecast()
    forecast.learn_end(trial("a"), record(6.0, 0.5, ended=True), wall=9.0)
    assert forecast.pace == pytest.approx(6.0 / 5.0)


def test_trials_that_end_early_say_what_to_expect_of_others() -> None:
    """Two of them after 0.5 and 0.3 of their work: 0.4 of a trial's is to be expected, or of what
    is left of it."""
    forecast = Forecast()
    for name, done in (("a", 0.4), ("b", 0.2)):
        early = record(20.0 * done, done)
        forecast.learn(trial(name), early)
        forecast.learn_part(Outcome(trial(name), "stopped", early))
    forecast.learn_part(Outcome(trial("c"), "failed", record(1.0, 0.0)))
    assert forecast.pace == pytest.approx(2.0)
    assert forecast.left(trial("d")) == pytest.approx(20.0 * 0.4)
    assert forecast.left(trial("d"), record(2.0, 0.1)) == pytest.approx(20.0 * (0.4 - 0.2))
    assert forecast.left(trial("d"), record(10.0, 0.5)) == pytest.approx(20.0 * 0.4 * (1 - 0.6))
    assert forecast.left(trial("d"), record(18.0, 0.9)) == 0


def test_trials_that_do_not_say_how_long_they_train() -> None:
    forecast = Forecast()
    unsaid = Trial("a", ("true",), seconds=10.0)
    forecast.learn(unsaid, record(8.0, 0.4))
    assert forecast.pace is None
    forecast.learn_end(unsaid, record(27.0, 0.9, ended=True), wall=31.0)
    assert forecast.pace == pytest.approx(3.0)
    assert forecast.left(unsaid) == pytest.approx(31.0)


def test_lanes_against_a_clock() -> None:
    """The reference goes second by second."""
    for lanes, waiting in product((1, 2, 3), ([], [3], [5, 1, 1, 4], [2, 2, 2, 2, 7])):
        running = [4, 2][:lanes]
        queue, busy, clock = list(waiting), list(running), 0
        while busy or queue:
            while queue and len(busy) < lanes:
                busy.append(queue.pop(0))
            clock += 1
            busy = [left - 1 for left in busy if left > 1]
        assert in_lanes(running, waiting, lanes) == clock


def test_pauses_are_no_work() -> None:
    """Resumed after 1,000 s, from a quarter further back."""
    first = record(8.0, 0.5)
    again = ({"time": 1000.0, "samples": 1400}, {"time": 1016.0, "samples": 2400})
    both = RunRecord(starts=(*first.starts, {"time": 999.0}), steps=(*first.steps, *again))
    assert measured(trial("a"), both) == (24.0, 0.75)
    assert measured(trial("a"), RunRecord()) == (0.0, 0.0)
