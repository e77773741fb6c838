"""The table of a scaling study, on runs with known figures: ratios within rounds, losses that add up,
predictions from the rows before."""

import json
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest

from allstep.costs.speed import Speed
from allstep.errors import ConfigError
from allstep.study.scale.explain import explain
from allstep.study.scale.parts import PARTS, MeasuredStep
from allstep.study.scale.row_prediction import KnownRow, Setup, forecast
from allstep.study.scale.study import MEASURED, ScaleRounds, parse_workers
from allstep.study.scale.table import ScaleTable
from allstep.study.trial import Outcome, Results
from support.synthetic_runs import lines, record

BATCH = 96
GRID = ScaleRounds(
    recipe="digits",
    overrides=(),
    workers=(1, 2, 4),
    rounds=2,
    batch=BATCH,
    cores=2,
)


def outcome(
    grid: ScaleRounds, workers: int, round_: int, seconds: float, compute: float
) -> Outcome:
    """A run whose steps take `seconds`: 0.01 s update, and what is neither is waiting."""
    steps = 100 / grid.batch_of(workers)  # of a line
    times = {
        "input": [0.0],
        "compute": [compute * steps],
        "wait": [(seconds - compute - 0.01) * steps],
        "update": [0.01 * steps],
    }
    made = record(lines(workers=workers, times=times, seconds=seconds * steps))
    made = replace(made, starts=tuple({**each, "bytes": 4e6} for each in made.starts))
    return Outcome(grid.trial(workers, round_), "stopped", made, MEASURED)


def results(grid: ScaleRounds, **steps: tuple[float, float]) -> Results:
    """By "w2": seconds and compute of a step; the second round is twice as slow in all."""
    found = {}
    for name, (seconds, compute) in steps.items():
        for round_ in range(grid.rounds):
            workers = int(name[1:])
            slow = 1 + round_
            each = outcome(grid, workers, round_, slow * (seconds - 0.01) + 0.01, slow * compute)
            found[each.trial.name] = each
    return found


def test_ratios_are_taken_within_a_round() -> None:
    table = ScaleTable(GRID, results(GRID, w1=(0.41, 0.40), w2=(0.22, 0.20)), 1000)
    two = table.rows[1]
    assert [each.workers for each in table.rows] == [1, 2]
    assert table.ratios(two) == pytest.approx([0.41 / 0.22, 0.81 / 0.43])
    assert table.efficiency(two) == pytest.approx(sum(table.ratios(two)) / 4)


@pytest.mark.parametrize("per_worker", [False, True])
def test_the_losses_add_up(per_worker: bool) -> None:
    grid = replace(GRID, per_worker=per_worker, batch=24 if per_worker else 96)
    table = ScaleTable(grid, results(grid, w1=(0.41, 0.40), w2=(0.3, 0.25), w4=(0.2, 0.1)), 1000)
    for row in table.rows:
        loss = table.loss(row)
        part = 1 if per_worker else 1 / row.workers
        assert loss.ideal == pytest.approx(part * table.base.mean.seconds)
        assert sum(loss.parts.values()) == pytest.approx(loss.seconds)
        assert tuple(loss.parts) == PARTS
    assert table.loss(table.base).seconds == pytest.approx(0)


def test_a_row_that_failed_is_left_out_and_the_page_says_so() -> None:
    found = dict(results(GRID, w1=(0.41, 0.40), w2=(0.22, 0.20)))
    bad = outcome(GRID, 4, 0, 0.2, 0.1)
    found[bad.trial.name] = replace(bad, status="failed", reason="exit status 1")
    page = ScaleTable(GRID, found, 1000).markdown()
    assert "strong scaling, batch 96" in page
    assert "**2 workers** lose" in page
    assert "4 workers" not in page
    assert "no number of workers was measured" in ScaleTable(GRID, {}, 1000).markdown()


def test_the_page_and_the_json_have_the_same_figures(tmp_path: Path) -> None:
    table = ScaleTable(GRID, results(GRID, w1=(0.41, 0.40), w2=(0.3, 0.25), w4=(0.2, 0.1)), 1000)
    page, rows = table.markdown(), table.as_json()["rows"]
    assert json.loads(json.dumps(rows)) == rows
    assert [row["workers"] for row in rows] == [1, 2, 4]
    assert rows[0]["predicted"] is None
    assert rows[1]["prediction_error"] is not None
    assert f"{rows[2]['prediction_error']:+.1%}" in page
    assert sum(rows[2]["loss"].values()) == pytest.approx(rows[2]["step"] - rows[2]["ideal_step"])
    table.draw(tmp_path / "scale.png")
    assert (tmp_path / "scale.png").stat().st_size > 10_000


# Predictions


def step(samples: int, compute: float, exposed: float = 0.0, update: float = 0.01) -> MeasuredStep:
    parts = dict.fromkeys(PARTS, 0.0) | {"compute": compute, "exposed": exposed, "update": update}
    return MeasuredStep(samples, sum(parts.values()), parts, None, 1.0, 0.0)


def test_a_prediction_repeats_the_rows_that_it_knows() -> None:
    """Compute is 50 ms and 1 ms per sample, communication 30 ms with two workers of a host."""
    setup = Setup(4e6, 1000, 8, None)
    one, two = KnownRow(1, 1, step(96, 0.146)), KnownRow(2, 1, step(96, 0.098, 0.03))
    assert forecast([], setup, 1, 96) is None
    again = forecast([one, two], setup, 2, 96)
    assert again is not None
    assert again.samples_per_second == pytest.approx(96 / two.step.seconds, rel=1e-3)
    four = forecast([one, two], setup, 4, 96)
    assert four is not None
    # 50 + 24 ms; the difference of the sums is as large as with two workers.
    assert 96 / four.samples_per_second == pytest.approx(0.074 + 0.03 + 0.01, rel=0.02)
    first = forecast([one], setup, 2, 96)
    assert first is not None and first.level == 0
    assert "factor of 2" in first.expected_error


def test_over_hosts_the_difference_is_put_on_the_link() -> None:
    setup = Setup(100e6, 1000, 1, Speed(1e-4, 1.25e9, inf))
    one, two = KnownRow(1, 1, step(96, 0.2)), KnownRow(2, 2, step(96, 0.1, 0.4))
    named = forecast([one], setup, 2, 96)
    slow = forecast([one, two], setup, 2, 96)
    assert named is not None and slow is not None
    assert named.samples_per_second > slow.samples_per_second
    assert slow.samples_per_second == pytest.approx(96 / two.step.seconds, rel=0.01)
    assert slow.level == 3
    assert "one run on several hosts" in slow.known


# Explanations


def test_the_largest_part_comes_first_with_its_advice() -> None:
    late = replace(step(96, 0.1, 0.05), late=3, lateness=1.9)
    loss = dict.fromkeys(PARTS, 0.0) | {"imbalance": 0.09, "exposed": 0.05, "compute": -0.02}
    late.parts["imbalance"] = 0.09  # type: ignore[index]
    late = replace(late, seconds=0.25)
    page = explain(4, late, loss)
    assert page.index("worker 3 works 1.90 times as long") < page.index("exposed communication")
    assert "shares=speed" in page
    assert "20.0 ms less than ideal" in page or "20 ms less than ideal" in page
    nothing = explain(2, step(96, 0.1), dict.fromkeys(PARTS, 0.0))
    assert "lose nothing" in nothing


# Bad input


@pytest.mark.parametrize("text", ["", "2,1", "1,1", "0,1", "1,x", "1;2", "-1", "1,,2", "9" * 9])
def test_numbers_of_workers_rise(text: str) -> None:
    with pytest.raises(ConfigError, match="expected a rising list of numbers of 1 or more"):
        parse_workers(text)
    assert parse_workers("1, 2,16") == (1, 2, 16)


def test_more_workers_than_samples_or_slots() -> None:
    with pytest.raises(ConfigError, match="--workers 4: a step has 3 samples, fewer than workers"):
        replace(GRID, batch=3).check()
    with pytest.raises(ConfigError, match="--workers 4: the hosts have 3 slots"):
        replace(GRID, hosts="h1:2,h2").check()
    replace(GRID, hosts="h1:2,h2:2").check()


def test_hosts_are_filled_in_order() -> None:
    grid = replace(GRID, hosts="h1:2,h2:2,h3:4", workers=(1, 2, 3, 8))
    assert [grid.num_hosts(each) for each in grid.workers] == [1, 1, 2, 3]
    assert grid.per_host == 4
    command = grid.trial(3, 0).command
    assert command[command.index("-np") + 1] == "3"
    assert "h1:2,h2:2,h3:4" in command
    assert GRID.num_hosts(4) == 1


def test_trials_are_alone_and_rounds_alternate() -> None:
    trials = GRID.trials()
    assert [each.name for each in trials[:6]] == [
        "w1.round0",
        "w2.round0",
        "w4.round0",
        "w4.round1",
        "w2.round1",
        "w1.round1",
    ]
    assert {each.cores for each in trials} == {2}
    assert all(not each.resume for each in trials)
    assert all(each.resume for each in replace(GRID, full=True).trials())
    assert replace(GRID, full=True).study().stop is None


def test_a_trial_ends_when_it_is_measured() -> None:
    trial = GRID.trial(2, 0)
    one = outcome(GRID, 2, 0, 0.2, 0.1).record
    short = replace(one, steps=one.steps[:3])
    assert GRID.stop(trial, short, {}) is None
    assert GRID.stop(trial, one, {}) == MEASURED
    assert replace(GRID, seconds=1e6).stop(trial, one, {}) is None
