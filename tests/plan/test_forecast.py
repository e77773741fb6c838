"""Forecasts: of a made-up study whose times are known."""

from itertools import product

import pytest

from allstep.plan.forecast import Forecast, in_lanes, in_words, seconds_worked
from allstep.plan.trial import Trial
from allstep.runlog import RunRecord


def record(seconds: float, done: float, ended: bool = False) -> RunRecord:
    start = {"time": 100.0, "data": {"train": 1000}}
    step = {"time": 100.0 + seconds, "samples": int(done * 4000)}
    return RunRecord(starts=(start,), steps=(step,), ends=({"time": 100.0 + seconds},) if ended else ())


def trial(name: str, seconds: float = 10.0) -> Trial:
    return Trial(name, ("true",), seconds=seconds, epochs=4)


def test_the_pace_is_that_of_the_work_done() -> None:
    forecast = Forecast()
    assert forecast.pace is None
    forecast.learn(trial("a"), record(1.0, 0.05))
    assert forecast.pace is None  # a second is too little
    forecast.learn(trial("a"), record(5.0, 0.25))
    assert forecast.pace == pytest.approx(2.0)
    assert forecast.left(trial("a"), record(5.0, 0.25)) == pytest.approx(15.0)
    assert forecast.left(trial("b", 30.0)) == pytest.approx(60.0)
    forecast.learn(trial("a"), record(24.0, 0.8), since=95.0)
    assert forecast.left(trial("b", 30.0)) == pytest.approx(90.0 + 5.0)  # and what it takes to start
    forecast.learn_end(trial("a"), record(30.0, 1.0, ended=True), wall=37.0)
    assert forecast.pace == pytest.approx(3.0)
    assert forecast.left(trial("b", 30.0)) == pytest.approx(90.0 + 7.0)  # and to end


def test_a_run_that_ends_early_counts_for_what_it_did() -> None:
    forecast = Forecast()
    forecast.learn_end(trial("a"), record(6.0, 0.5, ended=True), wall=6.0)
    assert forecast.pace == pytest.approx(6.0 / 5.0)


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
    lines = {"starts": ({"time": 0.0}, {"time": 1000.0}), "steps": ({"time": 4.0}, {"time": 1003.0})}
    assert seconds_worked(RunRecord(**lines)) == 7.0
    assert seconds_worked(RunRecord()) == 0.0


@pytest.mark.parametrize(
    ("seconds", "words"), [(3.4, "3 s"), (89, "89 s"), (150, "2 min"), (3000, "50 min"), (7500, "2 h 05 min")]
)
def test_in_words(seconds: float, words: str) -> None:
    assert in_words(seconds) == words
