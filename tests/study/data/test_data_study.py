"""The study of data on made-up records, whose errors by size are a formula."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from allstep.cli.app import app
from allstep.errors import ConfigError
from allstep.runlog import RunRecord
from allstep.study.data.improvement import improvement
from allstep.study.data.learning_curve import Curve, Points
from allstep.study.data.study import DataGrid, check_growth
from allstep.study.data.table import DataTable
from allstep.study.data.verdict import judge
from allstep.study.trial import Outcome
from allstep.train.config.read_config import read_config

WHOLE = 1294
CONFIG = read_config("digits", ["epochs=32", "schedule.warmup=4", "save.epochs=1"])
GRID = DataGrid(
    recipe="digits",
    overrides=("epochs=32", "schedule.warmup=4", "save.epochs=1", "data.name=digits"),
    config=CONFIG,
    whole=WHOLE,
    sizes=(80, 161, 323, 647, 1294),
    seeds=2,
    goal=0.93,
)


def law(n: float) -> float:
    return 0.02 + 1.5 * n**-0.45


def record(size: int, error: float, earlier: float | None = None, count: int = 5000) -> RunRecord:
    """Return the record of a run whose error fell to `earlier` by 80% of its samples."""
    samples = 32 * WHOLE
    before = error if earlier is None else earlier
    evals = [
        {
            "part": "validation",
            "samples": samples * k // 10,
            "accuracy": 1 - (error if k == 10 else before),
            "count": count,
            "time": 2.0 + k,
        }
        for k in range(1, 11)
    ]
    evals.append({"part": "test", "samples": samples, "accuracy": 0.9, "time": 13.0})
    step = {"kind": "step", "time": 2.0, "samples": samples, "seconds": 1.0, "loss": 0.1}
    return RunRecord(
        starts=({"time": 1.0, "data": {"train": size}},),
        steps=(step,),
        evals=tuple(evals),
        ends=({"time": 14.0},),
    )


def outcomes(of: DataGrid = GRID, factor: float = 1.0) -> dict[str, Outcome]:
    found = {}
    for trial in of.trials():
        size, seed = trial.facts["size"], trial.facts["seed"]
        error = factor * law(size) * (1.01 if seed else 0.99)
        found[trial.name] = Outcome(trial, "done", record(size, error))
    return found


def words(size: int) -> dict[str, str]:
    command = GRID.trial(size, 1).command
    return dict(each.partition("=")[::2] for each in command if "=" in each)


def test_all_sizes_have_the_updates_of_the_whole_split() -> None:
    """And what the config counts in epochs is at the same updates, warm-up and evaluations."""
    assert GRID.updates == 32 * 21
    for size in GRID.sizes:
        per_epoch = math.ceil(size / 64)
        given = words(size)
        epochs = int(given["epochs"])
        assert abs(epochs * per_epoch - GRID.updates) <= per_epoch / 2
        assert float(given["evaluation.every"]) == pytest.approx(epochs / 32)
        assert float(given["save.epochs"]) == pytest.approx(epochs / 32)
        assert float(given["schedule.warmup"]) == pytest.approx(4 * epochs / 32)
        assert (given["data.use"], given["seed"], given["batch"]) == (str(size), "1", "64")
        assert given["evaluation.stop_at"] == given["evaluation.patience"] == "null"
    assert words(1294)["epochs"] == "32"


def test_milestones_are_stretched_and_a_growing_batch_is_refused() -> None:
    stepped = read_config("digits", ["schedule.shape=step", "schedule.milestones=[10,20]"])
    command = replace(GRID, config=stepped, overrides=("schedule.shape=step",)).trial(647, 0)
    ratio = 21 / 11
    (given,) = [each for each in command.command if each.startswith("schedule.milestones=")]
    first, second = json.loads(given.partition("=")[2])
    assert (first, second) == pytest.approx((10 * ratio, 20 * ratio), rel=0.01)
    with pytest.raises(ConfigError, match=r"growth: .* needs one batch for all sizes"):
        check_growth(read_config("digits", ["growth.at=[2]"]))
    check_growth(CONFIG)


def test_the_table_has_every_figure(tmp_path: Path) -> None:
    table = DataTable(GRID, outcomes())
    page = table.markdown()
    row = next(line for line in page.splitlines() if line.startswith("| 647 "))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[:3] == ["647", "0.5", "61"] and cells[5] == "10.00 ± 0.00"
    assert float(cells[4].split(" ")[0]) == pytest.approx(100 * law(647), abs=0.006)
    assert table.curve is not None
    for multiple in (1, 10):
        found = table.curve.predict(multiple * WHOLE)
        assert found.low <= law(multiple * WHOLE) <= found.high
    assert "## Self-check" in page and [each.up_to for each in table.checks] == [647]
    assert "sufficient" in page
    found = json.loads(json.dumps(table.as_json(), allow_nan=False))
    assert found["verdict"]["kind"] in ("more data", "undecided")
    assert found["samples"] == WHOLE and len(found["sizes"][0]["runs"]) == 2
    table.draw(tmp_path / "study.png")
    assert (tmp_path / "study.png").read_bytes().startswith(b"\x89PNG")


def test_a_table_of_nothing_yet_and_of_some(tmp_path: Path) -> None:
    for results in ({}, dict(list(outcomes().items())[:3])):
        table = DataTable(GRID, results)
        page = table.markdown()
        assert f"a curve needs at least 4 sizes with a result, found {len(results)}" in page
        assert "is unknown without a curve" in page
        json.dumps(table.as_json(), allow_nan=False)
        table.draw(tmp_path / "study.png")


def test_runs_that_failed_are_no_points() -> None:
    results = outcomes()
    for name in ("80-seed0", "80-seed1"):
        results[name] = Outcome(results[name].trial, "failed", RunRecord(), "exit status 1")
    table = DataTable(GRID, results)
    assert table.points.samples == (161, 323, 647, 1294)
    assert "| 80 " in table.markdown() and "failed" in table.markdown()


def test_an_error_that_does_not_fall_gives_no_prediction() -> None:
    flat = {
        name: replace(each, record=record(each.trial.facts["size"], 0.1))
        for name, each in outcomes().items()
    }
    page = DataTable(GRID, flat).markdown()
    assert "No curve is fitted and nothing is predicted: the error does not fall" in page
    assert "## With more data" not in page


def test_runs_that_still_improve_are_reported() -> None:
    """18% to 15% of 5,000 samples is no chance; 15.2% to 15% is."""
    found = improvement([record(80, 0.15, 0.18), record(80, 0.15, 0.18)])
    assert found is not None and found.is_real
    assert (found.before, found.after) == pytest.approx((0.18, 0.15))
    assert found.spread == pytest.approx(math.sqrt(0.15 / 5000 / 2))
    chance = improvement([record(80, 0.15, 0.152)])
    assert chance is not None and not chance.is_real
    assert improvement([]) is None and improvement([RunRecord()]) is None
    results = outcomes()
    for name in ("1294-seed0", "1294-seed1"):
        results[name] = replace(results[name], record=record(1294, law(1294), law(1294) + 0.05))
    page = DataTable(GRID, results).markdown()
    assert "they still improved. More updates (`--epochs 64`)" in page


def exact(c: float, noise: float) -> Points:
    sizes = tuple(1000.0 * 2**k for k in range(8))
    errors = tuple(c + 3 * n**-0.5 for n in sizes)
    return Points(sizes, errors, tuple(noise * each for each in errors))


@pytest.mark.parametrize(
    ("points", "goal", "kind", "text"),
    [
        (exact(0.05, 0.005), 0.945, "more data", "needs about .* times the data"),
        (exact(0.05, 0.005), 0.96, "no amount", "No amount of data is enough for .* 96% .* above"),
        (exact(0.05, 0.1), 0.955, "undecided", "do not decide .*with a floor .*, without one"),
        (exact(0.05, 0.005), 0.93, "reached", "an accuracy of 93% is reached with 32,000 samples"),
    ],
)
def test_the_goal_in_words(points: Points, goal: float, kind: str, text: str) -> None:
    found = judge(points, Curve(points), goal, 128_000)
    assert found.kind == kind
    assert re.search(text, found.text)
    json.dumps(found.as_json(), allow_nan=False)
    if kind == "more data":
        assert found.times is not None
        true = (3 / (1 - goal - 0.05)) ** 2 / 128_000
        assert found.times.low <= true <= found.times.high
        assert found.times.value == pytest.approx(true, rel=0.1)


def test_without_a_curve_a_goal_is_reached_or_unknown() -> None:
    few = exact(0.05, 0.01).first(2)
    assert judge(few, None, 0.87, 128_000).kind == "reached"
    assert judge(few, None, 0.9, 128_000).kind == "no curve"


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["digits", "--sizes", "1/4,1/2,1"], "a curve needs at least 4 sizes, found 3"),
        (["digits", "--sizes", "1/64,1/32,...,1"], "has 20 of 1294 .* fewer than a batch of 64"),
        (["digits", "data.use=0.5"], "data.use=0.5: the study sets data.use .* give --sizes"),
        (["digits", "seed=3"], "seed=3: the study sets seed in each run; give --seeds"),
        (["digits", "evaluation.stop_at=0.9"], "all runs have the same number of updates"),
        (["digits", "growth.at=[2]", "--sizes", "1/8,1/4,...,1"], "needs one batch for all sizes"),
        (["digist"], "no recipe is called 'digist'"),
    ],
)
def test_bad_input_is_reported_before_anything_runs(
    tmp_path: Path, words: list[str], complaint: str
) -> None:
    arguments = ["study", "data", *words, "--out", str(tmp_path / "study")]
    with pytest.raises(ConfigError, match=complaint) as caught:
        CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "study").exists()
