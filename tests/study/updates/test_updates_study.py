"""The search for the fewest updates, on a made-up model whose updates by batch and rate are a
formula."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from allstep.runlog import RunRecord
from allstep.study.trial import Outcome, Trial
from allstep.study.updates.study import UpdatesSearch
from allstep.study.updates.table import UpdatesTable

SEARCH = UpdatesSearch(
    recipe="digits",
    overrides=("data.name=digits",),
    lr=0.05,
    base_batch=64,
    batches=(32, 128, 512, 2048),
    num_rates=6,
    goal=0.85,
    epochs=30,
    every=0.05,
    data="fashion-mnist",
)
BEST = {32: 0.07, 128: 0.28, 512: 0.56, 2048: 0.56}
FEWEST = {32: 1600, 128: 520, 512: 250, 2048: 160}


def needed(trial: Trial) -> int:
    """Twice as far from the best rate, 1.4 times as many updates."""
    batch, lr = trial.facts["batch"], trial.facts["lr"]
    return round(FEWEST[batch] * max(lr / BEST[batch], BEST[batch] / lr) ** 0.5)


def record(trial: Trial, updates: int, good: float) -> RunRecord:
    samples = updates * trial.facts["batch"]
    step = {"kind": "step", "time": 2.0, "samples": samples, "seconds": 1.0}
    return RunRecord(
        starts=({"time": 1.0, "data": {"train": 10**9}},),
        steps=(step,),
        evals=({"part": "validation", "samples": samples, "accuracy": good, "time": 2.0},),
    )


def outcome(trial: Trial) -> Outcome:
    if trial.facts["lr"] > 1.0:
        return Outcome(
            trial, "failed", record(trial, 10, 0.1), "exit status 1\nthe loss diverged at update 10"
        )
    return Outcome(trial, "done", record(trial, needed(trial), 0.86))


@pytest.fixture(scope="module")
def results() -> dict[str, Outcome]:
    """What the runner would do, one trial at a time."""
    found: dict[str, Outcome] = {}
    while True:
        following = [trial for trial in SEARCH.wanted(found) if trial.name not in found]
        if not following:
            return found
        found[following[0].name] = outcome(following[0])


def test_each_batch_finds_its_best_rate(results: dict[str, Outcome]) -> None:
    table = UpdatesTable(SEARCH, results)
    for row in table.rows:
        rates = [rate for rate, _ in row.tried]
        assert len(rates) <= 6
        assert row.best is not None
        best = min((run.reached.updates, rate) for rate, run in row.tried if run.reached)
        assert row.best == (best[1], best[0])
        assert row.best[1] <= 1.2 * FEWEST[row.batch]  # rates are a factor of 2 apart
    assert len(results) < 4 * 6
    assert any(outcome.status == "failed" for outcome in results.values())


def test_chains_go_side_by_side() -> None:
    """While one of a chain runs, the next of the others are wanted."""
    first = SEARCH.wanted({})
    assert [trial.facts["batch"] for trial in first] == [32, 128, 512, 2048]
    one = SEARCH.wanted({first[0].name: outcome(first[0])})
    assert one[0] == first[0] and [trial.facts["batch"] for trial in one[1:]] == [
        128,
        512,
        2048,
        32,
    ]


def test_the_trial_says_all(results: dict[str, Outcome]) -> None:
    trial = SEARCH.trial(128, 1)
    assert trial.name == "128-lr0.141"
    words = (
        "epochs=30 batch=128 seed=0 optimizer.lr=0.141 optimizer.scaling=none"
        " schedule.shape=constant schedule.warmup=0"
    )
    assert words in " ".join(trial.command)
    assert "evaluation.every=0.05 evaluation.stop_at=0.85" in " ".join(trial.command)


def test_it_is_stopped_at_twice_the_best_so_far() -> None:
    first, second = SEARCH.trial(128, 0), SEARCH.trial(128, 1)
    known = {first.name: Outcome(first, "done", record(first, 500, 0.86))}
    assert SEARCH.stop(second, record(second, 1000, 0.1), {}) is None
    assert SEARCH.stop(second, record(second, 1000, 0.1), known) is None
    said = SEARCH.stop(second, record(second, 1001, 0.1), known)
    assert said == "more than 2 times the 500 updates that lr 0.0707 needs"
    other = SEARCH.trial(512, 0)
    assert SEARCH.stop(other, record(other, 9000, 0.1), known) is None
    assert SEARCH.stop(second, RunRecord(), known) is None


def test_the_table(results: dict[str, Outcome], tmp_path: Path) -> None:
    table = UpdatesTable(SEARCH, results)
    page = table.markdown()
    assert "updates to 85% validation accuracy by batch" in page
    (row,) = [line for line in page.splitlines() if line.startswith("| 128 ")]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[5:7] == ["490", "3.5"]  # published, and against batch 32
    assert float(cells[4]) == pytest.approx(table.points()[32] / table.points()[128], abs=0.06)
    assert "Smin" in page and "critical batch" in page
    json.dumps(table.as_json(), allow_nan=False)
    assert "Published" not in UpdatesTable(replace(SEARCH, data="digits"), results).markdown()
    table.draw(tmp_path / "study.png")
    assert (tmp_path / "study.png").read_bytes().startswith(b"\x89PNG")


def test_a_table_of_nothing_yet(tmp_path: Path) -> None:
    table = UpdatesTable(SEARCH, {})
    assert "| 128 " in table.markdown() and table.fit() is None
    json.dumps(table.as_json(), allow_nan=False)
    table.draw(tmp_path / "study.png")
