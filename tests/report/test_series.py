"""Values over a run, and their coordinates.

References: what was written, numpy, and round trips through an axis.
"""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from allstep.report.curves import (
    BOTTOM,
    LEFT,
    RIGHT,
    TOP,
    Axis,
    Chart,
    Curve,
    draw,
    log_ticks,
    round_ticks,
    time_ticks,
)
from allstep.runlog import RunRecord
from allstep.study.recorded.series import (
    Clock,
    Series,
    kept,
    over_epochs,
    smoothed,
    steps,
    thinned,
    throughput,
    validations,
    world_changes,
)
from allstep.study.recorded.split import lateness_over_seconds, split
from allstep.study.recorded.worlds import longest
from support.synthetic_runs import BEGAN, SIZE, lines, record

FINITE = st.floats(-1e6, 1e6).filter(lambda value: value == 0 or abs(value) > 1e-6)


def test_what_a_resumed_run_did_again_replaces_what_it_did_before() -> None:
    """Killed after epoch 4, gone on from epoch 2 an hour later: one curve, and an hour that is not
    time of the run."""
    before = lines(epochs=4, loss=lambda i: 9.0, end=False)
    whole = lines(epochs=8, loss=lambda i: 1.0, began=BEGAN + 3600)
    after = [whole[0], *(line for line in whole[1:] if line.get("samples", SIZE * 9) > 2 * SIZE)]
    made = record(before + after)
    loss = over_epochs(made, steps(made), "loss")
    assert list(loss.x) == pytest.approx([(i + 1) / 10 for i in range(80)])
    assert list(loss.y) == [9.0] * 20 + [1.0] * 60
    assert [line["samples"] for line in validations(made)] == [SIZE * (i + 1) for i in range(8)]
    clock = Clock(made)
    assert clock(before[-1]["time"]) == pytest.approx(20.0)
    assert clock(made.ends[-1]["time"]) == pytest.approx(20.0 + 40.0)


@given(st.lists(st.integers(0, 30)))
def test_kept_lines_rise_and_end_with_the_last(samples: list[int]) -> None:
    found = [line["samples"] for line in kept({"samples": each} for each in samples)]
    assert found == sorted(set(found))
    assert found[-1:] == samples[-1:]
    last_seen = {each: i for i, each in enumerate(samples)}
    assert found == sorted(
        each
        for each, i in last_seen.items()
        if min(samples[i:]) == each and samples[i + 1 :].count(each) == 0
    )


def test_throughput_is_what_the_lines_say() -> None:
    made = record(lines(seconds=0.25))
    speed = throughput(made, bins=20)
    assert len(speed) == 20
    assert speed.y == pytest.approx([400.0] * 20)
    assert speed.x[-1] == pytest.approx(20.0)


def test_times_of_each_worker() -> None:
    times = {
        "input": [0.1, 0.1],
        "compute": [0.3, 0.6],
        "wait": [0.35, 0.05],
        "update": [0.05, 0.05],
    }
    made = record(lines(times=times, workers=2))
    found = split(made)
    assert found is not None
    assert found.slowest == 1
    assert found.own(1) == pytest.approx(79 * 0.75)  # without the first of 80 lines
    assert found.lateness == pytest.approx(0.75 / 0.45)
    assert found.share(0, "wait") == pytest.approx(0.35 / 0.8)
    assert lateness_over_seconds(made).y == pytest.approx([0.75 / 0.6] * 79)


def test_after_a_resume_with_more_workers_their_times_count() -> None:
    whole = lines(epochs=8, workers=4, began=BEGAN + 100)
    made = record(
        lines(epochs=4, workers=2, end=False)
        + [line for line in whole if line.get("samples", SIZE * 9) > 4 * SIZE]
    )
    found = split(made)
    assert found is not None and len(found.ranks) == 4


def test_the_times_of_ranks_are_those_of_the_longest_world() -> None:
    """The curve of the slowest worker has all worlds, each without its first line."""
    change = {"kind": "event", "text": "lost rank 2", "gap": 0.1, "hosts": ["h0", "h0"]}

    def extra(line: int) -> dict[str, list[float]]:
        compute = [0.2, 0.2, 0.5] if line < 30 else [0.1, 0.3]
        rest = {phase: [0.0] * len(compute) for phase in ("input", "wait", "update")}
        return {"compute": compute, **rest}

    made = lines(workers=3, extra=extra)
    number = next(i for i, line in enumerate(made) if len(line.get("compute", [])) == 2)
    change["time"] = made[number]["time"] - 0.01
    whole = record([*made[:number], change, *made[number:]])
    found = split(whole)
    assert found is not None and found.own(1) == pytest.approx(49 * 0.3)
    assert longest(whole).hosts == ("h0", "h0") and len(longest(whole).lines) == 50
    late = lateness_over_seconds(whole).y
    assert late == pytest.approx([0.5 / 0.3] * 29 + [0.3 / 0.2] * 49)


@given(st.lists(FINITE, min_size=1, max_size=2000), st.integers(2, 300))
def test_thinning_keeps_the_extremes(values: list[float], most: int) -> None:
    series = Series(tuple(map(float, range(len(values)))), tuple(values))
    thin = thinned(series, most)
    assert len(thin) <= max(most, 2)
    assert (min(thin.y), max(thin.y)) == (min(values), max(values))
    assert list(thin.x) == sorted(set(thin.x))


def test_smoothing_takes_means() -> None:
    values = np.random.default_rng(0).normal(size=1200)
    smooth = smoothed(Series(tuple(map(float, range(1200))), tuple(values)), 120)
    np.testing.assert_allclose(smooth.y, values.reshape(120, 10).mean(axis=1))


@given(FINITE, st.floats(1e-6, 1e6))
def test_ticks_are_round_and_within(low: float, span: float) -> None:
    high = low + span
    ticks = round_ticks(low, high)
    room = 1e-6 * max(abs(low), abs(high), span)
    if span > 1e-6 * abs(low):  # nearer together than that, floats run out of digits
        assert 2 <= len(ticks) <= 8
        assert all(low - room <= tick <= high + room for tick in ticks)


@given(st.floats(1e-6, 1e6), st.floats(1.4, 1e6))
def test_logarithmic_ticks_are_within(low: float, factor: float) -> None:
    ticks = log_ticks(low, low * factor)
    assert all(low <= tick <= low * factor for tick in ticks)
    assert ticks or factor < 2.6


def test_ticks_of_a_clock_are_round_for_people() -> None:
    assert time_ticks(50) == (0, 10, 20, 30, 40, 50)
    assert time_ticks(182) == (0, 60, 120, 180)
    assert time_ticks(5 * 3600) == tuple(3600.0 * i for i in range(6))
    assert time_ticks(40 * 86400)[1] == 7 * 86400


@given(st.lists(st.tuples(st.floats(0, 100), FINITE), min_size=1, max_size=50), st.booleans())
@example([(5e-324, 0.0)], False)
def test_every_point_lies_in_the_frame(points: list[tuple[float, float]], log: bool) -> None:
    points.sort()
    series = Series(tuple(x for x, _ in points), tuple(y for _, y in points))
    drawn = draw(Chart("t", "a", "epoch", (Curve("c", series),), log=log))
    assert drawn is not None
    for pair in drawn.curves[0].points.split():
        x, y = map(float, pair.split(","))
        assert LEFT <= x <= RIGHT
        assert TOP <= y <= BOTTOM
    assert all(TOP <= y <= BOTTOM for y, _ in drawn.y_ticks)


def test_an_axis_turns_values_into_points() -> None:
    assert Axis(0, 10, 100, 200)(2.5) == 125
    assert Axis(0.01, 1, 200, 100, log=True)(0.1) == pytest.approx(150)


def test_a_chart_without_points_is_not_drawn() -> None:
    assert draw(Chart("t", "a", "epoch", (Curve("c", Series()),))) is None


def test_the_table_behind_a_chart_has_its_last_values() -> None:
    series = Series(tuple(float(i) for i in range(1, 31)), tuple(i / 100 for i in range(1, 31)))
    drawn = draw(Chart("Accuracy", "a", "epoch", (Curve("validation", series),), "percent"))
    assert drawn is not None
    assert drawn.table[0] == ("epoch", "validation")
    assert drawn.table[-1] == ("30", "30%")
    assert 10 <= len(drawn.table) <= 13


def test_changes_of_the_workers_are_marks_of_the_throughput() -> None:
    """The totals at the end of an elastic run, and other events, are none."""
    start, step = {"time": 10.0}, {"time": 12.0, "samples": 100, "seconds": 1.0}
    events = (
        {"time": 11.0, "text": "lost rank 0", "gap": 0.3},
        {"time": 11.5, "text": "the batch grows"},
        {"time": 12.0, "text": "1 worker lost", "gap": 0.3, "total": True},
    )
    record = RunRecord(starts=(start,), steps=(step,), events=events)
    assert world_changes(record) == ((1.0, "lost rank 0"),)
