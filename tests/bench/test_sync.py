"""`allstep bench sync`: really run once, tiny; targets and bad input are tested on figures made up."""

import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from allstep.bench.comm.result import KB, MB
from allstep.bench.result import Missing, Row
from allstep.bench.sync import foreign_stores, measure
from allstep.bench.sync.foreign_stores import LR, MXNET, MXNET_TWO, ZEROMQ, Worker
from allstep.bench.sync.gloo_pairs import GLOO_PAIRS
from allstep.bench.sync.measure import check_python, how_to_get
from allstep.bench.sync.result import SyncResult, SyncRow
from allstep.bench.sync.store_rank import STORE, STORE_TWO
from allstep.cli.app import app
from allstep.errors import ConfigError


def _row(nbytes: int, name: str, *seconds: float, server: float = 0.0) -> SyncRow:
    return SyncRow(nbytes, Row(name, seconds), 1e-5, server)


RESULT = SyncResult(
    2,
    (
        _row(4 * KB, STORE, 10e-6, 12e-6, 9e-6),
        _row(4 * KB, STORE_TWO, 20e-6),
        _row(4 * KB, GLOO_PAIRS, 150e-6, server=2e-5),
        _row(4 * KB, MXNET, 250e-6),
        _row(4 * KB, MXNET_TWO, 390e-6),
        _row(MB, STORE, 1e-4),
        _row(MB, GLOO_PAIRS, 7e-4),
        _row(8 * MB, STORE, 1e-3),
    ),
    (Missing(ZEROMQ, "No module named 'zmq'"),),
)


@pytest.mark.usefixtures("peers")
def test_stores_are_measured_turn_by_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an environment for peers; every worker checks its weights at the end of a size."""
    turns: list[str] = []
    take = measure.Contender.take
    monkeypatch.setattr(
        measure.Contender, "take", lambda each: turns.append(each.name) or take(each)
    )
    monkeypatch.setattr(measure, "_SECONDS_PER_TURN", 0.002)
    monkeypatch.setattr(measure, "default_python", lambda: tmp_path / "peers" / "bin" / "python")
    file = tmp_path / "sync.json"
    options = ["--sizes", "4KB,2MB", "-r", "2", "--json", str(file)]
    outcome = CliRunner().invoke(app, ["bench", "sync", *options])
    assert outcome.exit_code == 0, outcome.output
    document = json.loads(file.read_text())
    there = [STORE, STORE_TWO, GLOO_PAIRS]
    assert [(row["bytes"], row["name"]) for row in document["rows"]] == [
        (nbytes, name) for nbytes in (4096, 2 << 20) for name in there
    ]
    for row in document["rows"]:
        assert len(row["seconds"]) == 2 and 0 < row["min"] <= row["median"] <= row["max"]
        assert row["cpu"]["worker"] > 0
        assert (row["cpu"]["server"] > 0) == (row["name"] == GLOO_PAIRS)
    # The first turn of each size is a warm-up.
    assert turns == there * 6
    assert [each["name"] for each in document["missing"]] == ["MXNet", "ZeroMQ"]
    for each in document["missing"]:
        assert "No such file" in each["reason"] and "mxnet==1.9.1" in each["reason"]


@pytest.mark.usefixtures("peers")
@pytest.mark.skipif("ALLSTEP_PEERS" not in os.environ, reason="needs MXNet and pyzmq")
def test_peers_of_another_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ALLSTEP_PEERS is the Python of an environment as `how_to_get` makes it."""
    monkeypatch.setattr(measure, "_SECONDS_PER_TURN", 0.002)
    file = tmp_path / "sync.json"
    options = ["--sizes", "4KB", "-r", "1", "--json", str(file)]
    options += ["--mxnet", os.environ["ALLSTEP_PEERS"]]
    outcome = CliRunner().invoke(app, ["bench", "sync", *options])
    assert outcome.exit_code == 0, outcome.output
    document = json.loads(file.read_text())
    assert document["missing"] == []
    assert {row["name"] for row in document["rows"]} >= {MXNET, MXNET_TWO, ZEROMQ}


def test_ratios_compare_the_same_calls() -> None:
    one, two, *_ = RESULT.rows
    assert RESULT.speed(one, "MXNet") == pytest.approx(25)
    assert RESULT.speed(two, "MXNet") == pytest.approx(19.5)
    assert RESULT.speed(two, "Gloo") == pytest.approx(7.5)


def test_targets() -> None:
    met = {(row.nbytes, row.row.name): RESULT.met(row) for row in RESULT.rows}
    assert met[4 * KB, STORE] is True
    assert met[4 * KB, STORE_TWO] is False
    # Without MXNet it is unknown; other sizes and the peers have no target.
    assert met[MB, STORE] is None and met[8 * MB, STORE] is None and met[4 * KB, MXNET] is None
    assert RESULT.unmet() == ["not met: 4 KB, allstep push+pull: 20x MXNet and 10x Gloo"]
    four = SyncResult(4, RESULT.rows, ())
    assert four.met(four.rows[0]) is None


def test_the_table_fits_a_terminal() -> None:
    screen = io.StringIO()
    Console(width=80, file=screen).print(RESULT.table())
    shown = screen.getvalue()
    rows = shown.splitlines()
    lines = [each for line in rows if (each := line.split())[:3] == ["allstep", "pushpull", "10.0"]]
    cells = "allstep pushpull 10.0 us 9.00 us 12.0 us 10.0 us 25.0 15.0 met"
    assert lines == [cells.split()]
    assert "not met: 4 KB, allstep push+pull" in shown
    assert "30.0 us" in shown  # worker and server
    assert RESULT.absences() == ["missing: ZeroMQ (No module named 'zmq')"]


def test_json_has_the_figures_behind_the_table() -> None:
    first = json.loads(RESULT.to_json())["rows"][0]
    assert first["speed"] == {"MXNet": pytest.approx(25), "Gloo": pytest.approx(15)}
    assert first["target"] == {"MXNet": 20, "Gloo": 10} and first["met"] is True


class Counter:
    """A store that counts, and can lose a push."""

    server = None

    def __init__(self, lost: int = 0) -> None:
        self.calls, self.computed, self._lost = 0, 0, lost

    def prepare(self, nbytes: int) -> None:
        self.calls = 0

    def compute(self) -> None:
        self.computed += 1

    def call(self) -> None:
        self.calls += 1

    def weights(self) -> tuple[float, float]:
        value = -(self.calls - self._lost) * LR
        return value, value


def _ask(worker: Worker, **request: Any) -> dict[str, Any]:
    return worker.answer({"name": "a", **request})


def test_weights_are_checked() -> None:
    good, bad = Counter(), Counter(lost=1)
    for store, error in ((good, None), (bad, "a: after 5 pushes the weights are")):
        worker = Worker({"a": store})
        assert _ask(worker, prepare=4096) == {"server": None}
        answer = _ask(worker, measure=5, limit=60.0)
        assert len(answer["seconds"]) == store.computed == 5 and answer["cpu"] >= 0
        found = _ask(worker, check=5)
        assert found == {} if error is None else found["error"].startswith(error)
    # At least one call, whatever the limit.
    assert len(_ask(Worker({"a": good}), measure=5, limit=0.0)["seconds"]) == 1


def test_a_python_that_is_not_there(tmp_path: Path) -> None:
    check_python(None)
    check_python(Path(sys.executable))
    with pytest.raises(ConfigError, match=r"--mxnet .*no such file; expected the Python of an env"):
        check_python(tmp_path / "python")
    assert "python3 -m venv /a/peers; /a/peers/bin/pip install" in how_to_get(
        Path("/a/peers/bin/python")
    )


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("ends", ["worker", "server"])
def test_a_process_of_a_peer_that_fails_ends_the_others(ends: str, tmp_path: Path) -> None:
    code = "import sys, time; time.sleep(0 if sys.argv[1] == sys.argv[-1] else 60); sys.exit(3)"
    with foreign_stores.starting([sys.executable, "-c", code], ends) as start:
        assert foreign_stores.lead(start, "zeromq", 2) == 1
