"""Calibration files, runs and studies as `allstep plan` reads them, and its bad input."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from allstep.cli.app import app
from allstep.costs.speed import Speed
from allstep.errors import ConfigError, DataError, UserError
from allstep.plan.calibration import Calibration, HostTimes, StepTimes
from allstep.plan.calibration_file import read_calibration, to_json
from allstep.plan.prediction import Question, knowledge, predict
from allstep.report.judge import one_change
from allstep.report.run import read_run
from allstep.study.calibration.batch_sizes import sizes_of
from allstep.study.calibration.calibrate import calibrate
from allstep.study.calibration.progress_to_goal import find_progress
from allstep.study.calibration.read_run import calibration_of_run
from allstep.train.config.read_config import read_config
from support.hosts import SshHosts

FACTS = {
    "model": "small-cnn",
    "options": json.dumps(dict(read_config("digits").model.options), sort_keys=True),
    "optimizer": read_config("digits").optimizer.name,
    "batch": 64,
    "batch_per_worker": 0,
    "cpu": "another",
    "cores": 999,
    "time": "2026-01-01",
}


def times(batch: int) -> StepTimes:
    compute = 0.01 + 1e-4 * batch
    return StepTimes(batch, compute / 3, 2 * compute / 3, (compute,) * 2, 0.001, 0.0, 0.02)


def calibration() -> Calibration:
    host = HostTimes(2, times(32), (), ((1e5, 1e-3), (1e6, 2e-3)))
    return Calibration((1e5, 1e6), (times(16), times(64)), 1500, host, facts=FACTS)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.json").write_text(to_json(calibration()))
    return tmp_path / "c.json"


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["plan", *arguments])


def refused(*arguments: str) -> str:
    """Return the error of a command that must end with one line and exit status 2."""
    ended = run(*arguments)
    assert isinstance(ended.exception, UserError), ended.output
    assert ended.exception.exit_code == 2
    line = str(ended.exception)
    assert "\n" not in line
    return line


# The command


def test_a_plan_from_a_file(file: Path) -> None:
    ended = run("digits", "--from", str(file), "--workers", "1,2,4,...,64", "--link", "1GB/s",
                "--json", "p.json", "--plot", "p.png", "--what-if", "link=2x")  # fmt: skip
    assert ended.exit_code == 0, ended.exception
    assert "strong scaling, batch 64" in ended.output
    found = json.loads(Path("p.json").read_text())
    assert [row["workers"] for row in found["rows"]] == [1, 2, 4, 8, 16, 32, 64]
    assert found["what_ifs"]
    assert len(found["changed"]) == 7
    assert Path("p.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--link", "fast"], "10Gbit/25us"),
        (["--workers", "4,2"], "rising order"),
        (["--workers", "1,2,128"], "batch 64: has fewer samples than 128 workers"),
        (["--alone", "quick"], "219@64"),
        (["--alone", "219"], "two batches"),
        (["--alone", "219@64", "--batch-per-worker", "32"], "SPEED@32"),
        (["--what-if", "lnk=2x"], "did you mean 'link'"),
        (["--batch", "64", "--batch-per-worker", "8"], "give one of them"),
        (["batch=128"], "batch 64, expected 128"),
        (["model.name=resnet18"], "model small-cnn, expected resnet18"),
        (["--price", "1"], "add --goal"),
        (["--goal", "0.9"], "allstep study updates digits"),
        (["--goal", "0.9", "--deadline", "soon"], "1h30m"),
        (["--goal", "0.9", "--budget", "-1"], "above 0"),
        (["-H", "h1:2"], "give one"),
        (["--out", "x.json"], "give one of them"),
        (["--json", "no/such/folder.json"], "folder"),
        (["--like", "none"], "not a run folder"),
    ],
)
def test_bad_input_is_one_line(file: Path, arguments: list[str], expected: str) -> None:
    assert expected in refused("digits", "--from", str(file), *arguments)


def test_without_a_recipe_the_command_says_what_it_expects() -> None:
    assert "--published" in refused()
    assert "expected one file" in refused("--published", "a.yaml", "b.yaml")


def test_a_kept_calibration_of_another_machine_lists_what_differs(file: Path) -> None:
    Path("plans").mkdir()
    file.rename("plans/digits.json")
    line = refused("digits")
    assert "cpu another, expected" in line
    assert "cores 999, expected" in line
    assert "--from" in line


def test_a_file_that_is_no_calibration(file: Path) -> None:
    file.write_text("{}")
    assert "is no calibration" in refused("digits", "--from", str(file))


# Sizes


def test_at_least_two_sizes_are_measured() -> None:
    assert sizes_of(512, None, 2) == (64, 256, 512)
    assert sizes_of(512, None, 1) == (128, 512)
    assert sizes_of(None, 64, 8) == (16, 64)
    assert sizes_of(1, None, 2) == (2, 4)
    assert sizes_of(None, 2, 2) == (2, 4)


# A run


def a_run(folder: Path, size: int = 2, hosts: int = 1, slow: float = 1.0, **more: Any) -> Path:
    """Write the record of a run whose step has 20 ms of computation and 10 ms of waiting."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"h{rank * hosts // size}" for rank in range(size)]
    batch, every = 32 * size, 10
    rows: list[dict[str, Any]] = [
        {
            "kind": "start",
            "time": 1e9,
            "config": {"batch": batch, "log_every": every},
            "world": {"size": size, "hosts": names},
            "data": {"train": 1500},
            "bytes": 1.1e6,
        }
    ]
    for line in range(1, 12):
        compute = [every * 0.020 * (slow if rank == size - 1 else 1.0) for rank in range(size)]
        seconds = every * (0.020 * slow + 0.010 + 0.001)
        rows.append(
            {
                "kind": "step",
                "time": 1e9 + line,
                "samples": line * every * batch,
                "seconds": seconds,
                "images_per_second": every * batch / seconds,
                "input": [0.0] * size,
                "compute": compute,
                "wait": [seconds - each - every * 0.001 for each in compute],
                "update": [every * 0.001] * size,
                **more,
            }
        )
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "run.jsonl").write_text(text)
    return folder


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_run_is_predicted_as_it_was(tmp_path: Path, size: int) -> None:
    for shape in (None, calibration()):
        made, known = calibration_of_run(a_run(tmp_path / "r", size), shape)
        question = Question(size, batch_per_worker=32)
        found = predict(made, known, question, size)
        if size > 1:
            assert found.seconds == pytest.approx(0.031, rel=0.01)
        assert found.parts["compute"] + found.parts["contention"] == pytest.approx(0.02, rel=0.01)


def test_a_run_on_two_hosts_shows_the_link(tmp_path: Path) -> None:
    _, known = calibration_of_run(a_run(tmp_path / "r", 4, hosts=2), None)
    assert known.level == 3
    assert known.link is not None
    assert known.link.bandwidth < Speed(0, 12.5e9, math.inf).bandwidth


def test_a_run_names_its_straggler(tmp_path: Path) -> None:
    _, known = calibration_of_run(a_run(tmp_path / "r", 4, slow=1.5), None)
    assert (known.slow, known.slowest) == (pytest.approx(1.5), 3)


def test_a_run_of_another_model_is_refused(tmp_path: Path) -> None:
    other = replace(calibration(), nbytes=(1e5, 2e6))
    with pytest.raises(ConfigError, match="same model"):
        calibration_of_run(a_run(tmp_path / "r"), other)


@pytest.mark.parametrize("more", [{"compute": "x"}, {"wait": [1.0]}, {"seconds": None}])
def test_a_damaged_run_is_one_line(tmp_path: Path, more: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="too few"):
        calibration_of_run(a_run(tmp_path / "r", **more), None)


# A goal


def a_study(folder: Path, batches: list[int], accuracy: float = 0.8) -> Path:
    for batch in batches:
        run_folder = folder / "runs" / f"b{batch}"
        run_folder.mkdir(parents=True)
        updates = math.ceil(100 + 20_000 / batch)
        rows = [
            {"kind": "start", "time": 1e9, "config": {"batch": batch}, "data": {"train": 10**6}},
            {"kind": "step", "time": 1e9, "samples": updates * batch, "seconds": 1.0},
            {"kind": "eval", "time": 1e9, "part": "validation", "samples": updates * batch,
             "accuracy": accuracy},
            {"kind": "end", "time": 1e9},
        ]  # fmt: skip
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (run_folder / "run.jsonl").write_text(text)
    return folder


def test_updates_to_a_goal_come_from_the_runs_of_a_study(tmp_path: Path) -> None:
    found = find_progress("digits", a_study(tmp_path / "s", [32, 128, 512, 2048]), 0.75)
    assert found.fewest_updates == pytest.approx(100, rel=0.05)
    assert found.fewest_samples == pytest.approx(20_000, rel=0.05)
    assert not found.is_ratio


def test_a_goal_that_no_trial_reached_states_the_best(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"0\.8; give a goal below"):
        find_progress("digits", a_study(tmp_path / "s", [32, 128, 512]), 0.9)


def test_two_batches_are_too_few(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least 3 batches"):
        find_progress("digits", a_study(tmp_path / "s", [32, 128]), 0.75)


def test_a_noise_scale_gives_ratios_only(tmp_path: Path) -> None:
    found = find_progress("digits", a_run(tmp_path / "r", noise_scale=1234.0), None)
    assert found.is_ratio
    assert found.critical_batch == 1234.0
    with pytest.raises(ConfigError, match="noise_scale=true"):
        find_progress("digits", a_run(tmp_path / "q"), None)


def test_a_goal_in_the_table(file: Path) -> None:
    a_study(Path("studies/digits-updates"), [32, 128, 512, 2048])
    ended = run("digits", "--from", str(file), "--workers", "1,2,4", "--goal", "0.75",
                "--price", "0.9", "--json", "p.json")  # fmt: skip
    assert ended.exit_code == 0, ended.exception
    assert "Recommended:" in ended.output
    goal = json.loads(Path("p.json").read_text())["goal"]
    assert goal["rows"][0]["money"] == pytest.approx(0.9 * goal["rows"][0]["worker_hours"])
    ended = run("digits", "--from", str(file), "--workers", "1,2,4", "--study",
                str(a_run(Path("noisy"), noise_scale=500.0)))  # fmt: skip
    assert "hours are unknown" in ended.output, ended.exception


# Real measurements


@pytest.mark.usefixtures("processes")
def test_a_plan_of_digits_on_this_machine(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers are measured and the table is printed; a second call does not measure."""
    monkeypatch.setattr("allstep.study.calibration.calibrate.EFFORT", 0.05)
    asked = ["digits", "--per-host", "2", "--workers", "1,2,4", "--out", "kept.json"]
    ended = run(*asked)
    assert ended.exit_code == 0, (ended.exception, ended.output)
    kept = read_calibration(Path("kept.json"))
    assert [each.batch for each in kept.steps] == [8, 32, 64]
    assert kept.host is not None
    assert len(kept.host.by_rank) == kept.host.workers == 2
    assert kept.host.together is not None
    for each in kept.steps:
        assert 0 < each.forward < each.compute
        assert all(each.forward <= one <= each.compute for one in each.ready)
    again = run(*asked)
    assert again.exit_code == 0
    assert "calibrating" not in again.output


@pytest.mark.usefixtures("processes")
def test_a_calibration_over_two_hosts_measures_the_link(
    two_hosts: SshHosts, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("allstep.study.calibration.calibrate.EFFORT", 0.05)
    monkeypatch.setenv("ALLSTEP_SSH", two_hosts.ssh)
    shape = ["qdisc", "add", "dev", "eth0", "root", "tbf", "rate", "100mbit", "burst", "32kb"]
    try:
        for host in (0, 1):
            two_hosts.exec(host, "tc", *shape, "latency", "50ms", check=True)
        found = calibrate("digits", [], hosts="h1:1,h2:1")
    finally:
        for host in (0, 1):
            two_hosts.exec(host, "tc", "qdisc", "del", "dev", "eth0", "root")
    assert found.host is None
    assert found.hosts is not None
    assert (found.hosts.hosts, found.hosts.per_host) == (2, 1)
    # 100 Mbit/s less headers, and a burst of 32 KB in a message of 1 MB; a busy machine is slower.
    assert 1e6 < found.hosts.link.bandwidth < 1.1 * 12.5e6
    assert len(found.hosts.sums) == 3
    known = knowledge(found)
    assert known.level == 3
    again = predict(found, known, Question(1, batch_per_worker=found.hosts.batch), 2)
    assert found.hosts.together is not None
    assert again.seconds == pytest.approx(found.hosts.together, rel=0.05)


# The report


def test_the_report_states_what_one_change_would_gain(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "runs" / "r", 4, hosts=2)
    assert one_change(read_run(folder)) == []
    (folder / "calibration.json").write_text(to_json(calibration()))
    (found,) = one_change(read_run(folder))
    assert "most of the loss is the fixed part of small shares" in found.figures
    assert "`link=2x` would save" in found.advice
    other = replace(calibration(), nbytes=(1e5, 2e6))
    (folder / "calibration.json").write_text(to_json(other))
    assert one_change(read_run(folder)) == []
    assert one_change(read_run(a_run(tmp_path / "runs" / "one", 1))) == []
