"""The sync study: which runs it wants, and the table and plots of made-up results."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from allstep.errors import ConfigError
from allstep.runlog import RunRecord
from allstep.study import StudyFolder, run
from allstep.study.findings import write_findings
from allstep.study.study import Study
from allstep.study.sync import study as sync_study
from allstep.study.sync.modes import overrides_of, parse_faults, parse_modes
from allstep.study.sync.study import SyncGrid
from allstep.study.sync.table import SyncTable, images_per_second
from allstep.study.trial import Outcome
from allstep.train.config import sync_config

SLOW = "slow:3@rank=1"


def grid(**changes: Any) -> SyncGrid:
    plain = SyncGrid(
        recipe="digits",
        overrides=("data.name=digits",),
        modes=("allreduce", "shares=speed"),
        faults=("none", SLOW),
        parties=2,
        seeds=2,
        epochs=3,
        batch=64,
        goal=0.9,
    )
    return replace(plain, **changes)


def record(speed: float, accuracies: list[float], test: float, ages: Any = None) -> RunRecord:
    """An epoch has 1,000 samples and one line; its first line is slow."""
    steps, evals, syncs = [], [], []
    for epoch, accuracy in enumerate(accuracies, start=1):
        line = {"time": 10.0 * epoch, "samples": 1000 * epoch}
        seconds = 1000 / speed + (5 if epoch == 1 else 0)
        steps.append({**line, "seconds": seconds, "loss": 1.0})
        evals.append({**line, "part": "validation", "accuracy": accuracy})
        if ages is not None:
            syncs.append({**line, "parties": ages})
    evals.append({"time": 99.0, "part": "test", "accuracy": test})
    start = {"time": 1.0, "data": {"train": 1000}, "config": {}}
    end = {"time": 99.0}
    return RunRecord((start,), tuple(steps), tuple(evals), (), (), (end,), tuple(syncs))


def outcomes(asked: SyncGrid) -> dict[str, Outcome]:
    """allreduce halves its speed with a slow worker, shares=speed loses a tenth."""
    speeds = {("allreduce", "none"): 1000, ("allreduce", SLOW): 500, ("shares=speed", SLOW): 900}
    found = {}
    for trial in asked.trials():
        mode, fault, seed = (trial.facts[key] for key in ("mode", "fault", "seed"))
        speed = speeds.get((mode, fault), 1000)
        test = 0.90 + 0.02 * seed - (0.01 if mode != "allreduce" else 0)
        made = record(speed, [0.7, 0.8, 0.92], test)
        found[trial.name] = Outcome(trial, "done", made)
    return found


def test_modes_and_faults_of_the_command() -> None:
    assert parse_modes("server, ASYNC,stale:2,server") == ["server", "async", "stale:2"]
    assert parse_modes("async,allreduce,local:8") == [
        *("async", "allreduce", "shares=speed", "local:8")
    ]
    assert parse_modes("shares=speed,allreduce") == ["shares=speed", "allreduce"]
    assert overrides_of("diloco:32+optimizer.name=adamw") == (
        "sync=diloco:32",
        "optimizer.name=adamw",
    )
    assert overrides_of("shares=speed") == ("shares=speed",)
    assert parse_faults("none,slow:3@rank=1,step=5-9,slow:2@rank=0") == [
        *("none", "slow:3@rank=1,step=5-9", "slow:2@rank=0")
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stael:2", r"--modes: sync=stael:2: unknown mode; did you mean 'stale'"),
        ("stale:0", r"use sync=server"),
        ("async+lr", r"expected key=value after \+, such as async\+sync.correct=lr, found 'lr'"),
        (" ,", r"expected modes such as allreduce,async,stale:2, found nothing"),
    ],
)
def test_wrong_modes(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_modes(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [("slwo:3@rank=1", "--faults: fault 'slwo:3@rank=1'"), ("", "found nothing")],
)
def test_wrong_faults(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_faults(text)


def test_the_grid() -> None:
    trials = grid().trials()
    assert [trial.name for trial in trials[:4]] == [
        "allreduce.none.seed0",
        "shares=speed.none.seed0",
        "allreduce.slow-3-rank=1.seed0",
        "shares=speed.slow-3-rank=1.seed0",
    ]
    assert len(trials) == 8 and trials[4].name == "allreduce.none.seed1"
    words = " ".join(trials[3].command)
    assert "--workers 2 --launcher none --fault slow:3@rank=1 --out FOLDER" in words
    assert words.endswith("data.name=digits epochs=3 seed=0 shares=speed")
    assert len({trial.settings for trial in trials}) == 8
    assert "--fault" not in trials[0].command


def test_seeds_modes_and_faults_can_be_added(tmp_path: Path) -> None:
    folder = StudyFolder(tmp_path)

    def wants(asked: SyncGrid) -> Study:
        return replace(asked.study(), wanted=lambda results: [])

    run(wants(grid(seeds=1, faults=("none",))), folder, 1)
    run(wants(grid()), folder, 1)
    with pytest.raises(ConfigError, match="parties was 2, now 3"):
        run(wants(grid(parties=3)), folder, 1)
    with pytest.raises(ConfigError, match="faults was"):
        run(wants(grid(faults=("none",))), folder, 1)


def test_a_mode_that_cannot_run_is_a_cell_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync_config, "AVAILABLE", ("allreduce",))
    asked = grid(modes=("allreduce", "elastic:8"))
    assert [trial.facts["mode"] for trial in asked.trials()] == ["allreduce"] * 4
    page = SyncTable(asked, {}).markdown()
    assert "| elastic:8 | not available |" in page
    assert "- elastic:8: " in page and "not available yet" in page
    assert "run " not in asked.impossible["elastic:8"]
    with pytest.raises(ConfigError, match=r"--modes: none can run: .*not available yet"):
        grid(modes=("elastic:8",)).study()


def test_the_table_of_made_up_results() -> None:
    asked = grid()
    table = SyncTable(asked, outcomes(asked))
    cell = table.cells[SLOW, "shares=speed"]
    assert cell.test == pytest.approx([0.89, 0.91])
    # 2,000 samples after the first line, which is slow and does not count.
    assert cell.speeds == pytest.approx([900, 900])
    assert cell.seconds == pytest.approx([3000 / 900 + 5] * 2)
    page = table.markdown()
    rows = [line.split("|")[1:-1] for line in page.splitlines() if line.startswith("| shares")]
    slow = [each.strip() for each in rows[1]]
    assert slow[:5] == ["shares=speed", "90.00 ± 1.41", "-1.00", "900 ± 0", "1.80x"]
    assert slow[5:] == ["8.3 ± 0.0", "0.76x", "-"]
    assert "## Without faults" in page and "## With `slow:3@rank=1`" in page


def test_staleness_and_failed_runs() -> None:
    asked = grid(seeds=1, goal=None, faults=("none",))
    results = outcomes(asked)
    first, second = asked.trials()
    ages = {
        "0": {"samples": 750, "pushes": 3, "ages": {"0": 2, "1": 1}},
        "1": {"samples": 250, "pushes": 1, "ages": {"3": 1}},
    }
    results[first.name] = Outcome(first, "done", record(1000, [0.5, 0.6], 0.6, ages))
    results[second.name] = Outcome(second, "failed", record(1000, [0.5], 0.5), "exit status 1")
    table = SyncTable(asked, results)
    page = table.markdown()
    assert " 1.00, 3 |" in page  # 0.75 x 1/3 + 0.25 x 3
    assert "| shares=speed |   failed |" in page
    assert "seconds to" not in page


def test_the_three_files(tmp_path: Path) -> None:
    asked = grid()
    (tmp_path / "study").mkdir()
    folder, results = StudyFolder(tmp_path / "study"), outcomes(asked)
    page = write_findings(folder, SyncTable(asked, results), results, "allstep study sync")
    assert page == (folder.path / "table.md").read_text()
    assert (folder.path / "study.png").read_bytes().startswith(b"\x89PNG")
    assert '"images_per_second": 900.0' in (folder.path / "table.json").read_text()


def test_throughput_needs_two_lines() -> None:
    assert images_per_second(record(1000, [0.5], 0.5)) is None
    assert images_per_second(RunRecord()) is None


def test_keys_that_the_study_sets() -> None:
    assert set(sync_study.SET) == {"sync", "sync.name", "shares", "seed"}
