"""`allstep bench step --framework`: each framework runs once, tiny, with its peer; errors and tables
are tested on figures made up."""

import io
import json
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from allstep.bench import Missing
from allstep.bench.comm.measure import CommFailed
from allstep.bench.step import measure as step
from allstep.bench.step.frameworks import measure, tasks
from allstep.bench.step.frameworks.rank import FrameworkRank
from allstep.bench.step.frameworks.result import PARTS, FrameworkResult
from allstep.bench.step.frameworks.tasks import (
    BRIDGE,
    DATA_PARALLEL,
    FRAMEWORKS,
    MIRRORED,
    TAPE,
    TRAINER,
)
from allstep.bench.step.result import ALONE, OPTIMIZER, StepRow
from allstep.cli.app import app
from allstep.errors import ConfigError
from conftest import SOAK

ROWS = {
    "keras-torch": [ALONE, OPTIMIZER, BRIDGE],
    "keras-tensorflow": [ALONE, OPTIMIZER, BRIDGE, MIRRORED],
    "keras-jax": [ALONE, OPTIMIZER, BRIDGE, DATA_PARALLEL],
    "tensorflow": [ALONE, TAPE, BRIDGE],
    "mxnet": [ALONE, TRAINER],
}


# Starting all sets of ranks, those of the peer too, takes up to 40 s: in `make soak` only.
RUN = list(ROWS) if SOAK else ["keras-torch", "tensorflow", "mxnet"]


@pytest.mark.soak(1)
@pytest.mark.usefixtures("peers")
@pytest.mark.parametrize("framework", RUN)
def test_a_framework_trains_turn_by_turn(
    framework: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if absent := [name for name in FRAMEWORKS[framework].packages if not find_spec(name)]:
        pytest.skip(f"{absent[0]} is not installed")
    monkeypatch.setattr(step, "_SECONDS_PER_TURN", 0)
    if framework == "tensorflow":
        # keras-tensorflow has the same peer.
        plain = tasks.Framework(FRAMEWORKS[framework].packages, FRAMEWORKS[framework].backend)
        monkeypatch.setitem(FRAMEWORKS, framework, plain)  # type: ignore[arg-type]
    file = tmp_path / "step.json"
    options = ["--framework", framework, "--batch", "2", "-r", "1", "--json", str(file)]
    outcome = CliRunner().invoke(app, ["bench", "step", *options])
    assert outcome.exit_code == 0, f"{outcome.output}\n{outcome.exception}"

    document = json.loads(file.read_text())
    assert document["missing"] == []
    rows = {row["name"]: row for row in document["rows"]}
    assert list(rows) == ROWS[framework]
    assert all(row["framework"] == framework and row["model"] == "cnn" for row in rows.values())
    assert all(row["cpu"] and row["seconds"] for row in rows.values())
    ours = rows[ROWS[framework][1]]["parts"]
    assert set(PARTS) == ours.keys() and all(seconds >= 0 for seconds in ours.values())
    assert rows[ALONE]["parts"] == {}
    if BRIDGE in rows:
        assert "waiting" not in rows[BRIDGE]["parts"] and rows[BRIDGE]["parts"]["bridging"] > 0


# What cannot be measured


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--framework", "caffe"], "choose one of torch, keras-torch, keras-tensorflow, keras-jax"),
        (["--framework", "keras-torch", "--model", "vgg"], "one of cnn, resnet18, dense"),
        (["--framework", "mxnet", "--model", "resnet18"], "choose one of cnn, dense"),
        (["--framework", "keras-torch", "--model", "dense", "--np", "900"], "GB are free"),
    ],
)
def test_bad_input_is_reported_before_ranks_start(
    options: list[str], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(measure, "start_team")
    monkeypatch.setattr(tasks, "find_spec", lambda module: object())
    outcome = CliRunner().invoke(app, ["bench", "step", *options])
    assert isinstance(outcome.exception, ConfigError) and text in str(outcome.exception)
    assert "\n" not in str(outcome.exception)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_missing_package_is_named(framework: str, monkeypatch: pytest.MonkeyPatch) -> None:
    *_, package = FRAMEWORKS[framework].packages.values()
    monkeypatch.setattr(
        tasks, "find_spec", lambda module: None if module == package else sys.modules
    )
    outcome = CliRunner().invoke(app, ["bench", "step", "--framework", framework])
    assert isinstance(outcome.exception, ConfigError)
    assert f"needs {package}, which is not installed" in str(outcome.exception)


def test_a_peer_that_does_not_start_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def start(name: str, *rest: Any) -> Any:
        if name == "peer":
            raise CommFailed("peer ended:\nno route")
        return SimpleNamespace(names=[ALONE])

    monkeypatch.setattr(measure, "start_team", start)
    missing: list[Missing] = []
    ending: Any = None
    teams = measure._start(("keras-jax", "cnn", "2"), 2, tmp_path, ending, missing)
    assert [team.names for team in teams] == [[ALONE]]
    assert missing == [Missing(DATA_PARALLEL, "it fails here: no route")]


def test_a_peer_that_ends_has_failed_and_the_others_go_on() -> None:
    def ends(order: Any) -> Any:
        raise CommFailed("peer ended after prepare:\nSegmentation fault")

    peer: Any = SimpleNamespace(name="peer", names=[MIRRORED], request=ends)
    ours: Any = SimpleNamespace(name="allstep run", names=[ALONE], request=lambda order: [{}])
    teams = measure.Teams([ours, peer])
    assert teams.request({"prepare": MIRRORED}) == [{"failed": "peer ended after prepare:"}]
    assert teams.request({"prepare": ALONE}) == [{}]
    ours.request = ends
    with pytest.raises(CommFailed):
        teams.request({"prepare": ALONE})


def test_an_error_of_a_contender_is_an_answer() -> None:
    def fails() -> Any:
        raise RuntimeError("no such op\nmore")

    rank = FrameworkRank((0, 1), {ALONE: fails}, [], lambda: None, lambda parts: io.StringIO())
    assert rank.answer({"prepare": ALONE}) == {"failed": "RuntimeError: no such op"}


# Figures made up


def _row(name: str, seconds: list[float], cpu: list[float]) -> StepRow:
    speeds = [1.0 / each for each in seconds]
    return StepRow(name, seconds, speeds, [1.0], 1 << 20, {"waiting": 0.01}, cpu, cpu)


def test_the_bridge_is_compared_by_cpu_time() -> None:
    rows = [_row(ALONE, [1.0] * 3, [1.0] * 3), _row(BRIDGE, [1.0, 2.0, 1.0], [1.01, 1.5, 1.02])]
    result = FrameworkResult("cnn", 2, 32, 10, rows, [], "keras-jax")
    assert result.bridge_share == pytest.approx(0.02)
    text = io.StringIO()
    Console(file=text, width=80).print(result.table())
    assert "the bridge adds 2.00% of CPU time to a step (1.00 to 50.00)" in text.getvalue()
    assert "102.00" in text.getvalue()  # CPU ms of a step

    without = FrameworkResult("cnn", 2, 32, 10, rows[:1], [], "mxnet")
    assert without.bridge_share is None and without.targets == {}
