"""`allstep bench comm`: really run once, tiny; targets, sums and the ways out are tested on figures
made up."""

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from allstep.bench import CommResult, Missing, Row, launch
from allstep.bench.comm import measure as comm
from allstep.bench.comm import rank as comm_rank
from allstep.bench.comm.measure import CommFailed
from allstep.bench.comm.rank import CommRank, SumContender, check, fill
from allstep.bench.comm.result import (
    CACHES,
    COLD,
    GLOO,
    HOT,
    KB,
    MB,
    OPEN_MPI,
    PRIVATE,
    SHARED,
    WRITTEN,
    CommRow,
    parse_caches,
    parse_ranks,
    parse_sizes,
)
from allstep.cli.app import app
from allstep.comm.network.algorithms import ALGORITHMS
from allstep.errors import ConfigError


def _row(num_ranks: int, nbytes: int, name: str, *seconds: float) -> CommRow:
    return CommRow(num_ranks, nbytes, Row(name, seconds), sum(seconds) / len(seconds))


RESULT = CommResult(
    (
        _row(2, 4 * KB, PRIVATE, 8e-6, 9e-6, 7e-6),
        _row(2, 4 * KB, GLOO, 200e-6, 100e-6, 900e-6),
        _row(2, 100 * MB, SHARED, 0.02, 0.02, 0.02),
        _row(2, 100 * MB, PRIVATE, 0.03, 0.03, 0.03),
        _row(2, 100 * MB, GLOO, 0.09, 0.09, 0.09),
        _row(2, 100 * MB, OPEN_MPI, 0.06, 0.06, 0.06),
        _row(4, 100 * MB, SHARED, 0.06, 0.06, 0.06),
    ),
    (Missing("Open MPI, 4 ranks", "it fails here"),),
)


@pytest.mark.usefixtures("peers")
def test_everybody_is_measured_turn_by_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns: list[str] = []
    request = comm.Team.request
    monkeypatch.setattr(
        comm.Team,
        "request",
        lambda team, word: turns.append(word.get("measure", "prepare")) or request(team, word),
    )
    monkeypatch.setattr(comm, "_SECONDS_PER_TURN", 0.005)
    file = tmp_path / "comm.json"
    options = ["--ranks", "2", "--sizes", "4KB,256KB", "-r", "2", "--json", str(file)]
    outcome = CliRunner().invoke(app, ["bench", "comm", *options])
    assert outcome.exit_code == 0, outcome.output
    document = json.loads(file.read_text())
    by_algorithm = [f"allstep, {name}" for name in ALGORITHMS]
    there = [SHARED, PRIVATE, GLOO, *([OPEN_MPI] if not comm._no_mpi() else []), *by_algorithm]
    assert [(row["bytes"], row["name"]) for row in document["rows"]] == [
        (nbytes, name) for nbytes in (4096, 262144) for name in there
    ]
    for row in document["rows"]:
        assert (
            row["ranks"] == 2
            and len(row["seconds"]) == 2
            and 0 < row["min"] <= row["median"] <= row["max"]
        )
        assert bool(row["target"]) == (row["bytes"] == 4096 and row["name"] in (SHARED, PRIVATE))
    assert [
        turn for turn in turns if turn != "prepare"
    ] == there * 3 * 2  # the first round is the warm-up
    assert document["benchmark"] == "comm" and document["machine"]["cores"] >= 1


@pytest.mark.parametrize(
    ("mpirun", "reason"),
    [("", "mpirun is not installed"), ("/bin/mpirun", "mpirun is another MPI's")],
)
def test_a_missing_peer_says_why(mpirun: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comm.shutil, "which", lambda name: mpirun)
    monkeypatch.setattr(launch, "output_of", lambda *command: "HYDRA")
    assert comm._no_mpi() == reason


@pytest.mark.usefixtures("processes")
def test_ranks_that_fail_are_an_error_and_a_peer_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mpirun = tmp_path / "mpirun"
    mpirun.write_text("#!/bin/sh\necho no MPI today\nexit 3\n")
    mpirun.chmod(0o755)
    monkeypatch.setattr(comm, "_no_mpi", lambda: "")
    monkeypatch.setattr(launch, "mpirun_command", lambda: (str(mpirun), "-np", "2"))
    start = comm.start_team

    def only_mpi(name: str, *args: object) -> comm.Team:
        if name == "mpirun":
            return start(name, *args)  # type: ignore[arg-type]
        ended = subprocess.Popen([sys.executable, "-c", ""], text=True)
        ended.wait()
        return comm.Team(name, ended, tmp_path / "mpirun", names=[SHARED])

    monkeypatch.setattr(comm, "start_team", only_mpi)
    missing: dict[str, str] = {}
    with comm._teams(2, missing) as teams:
        assert [team.name for team in teams] == ["allstep run"]
    assert missing == {"Open MPI, 2 ranks": "it fails here: no MPI today"}


@pytest.mark.usefixtures("processes")
def test_a_rank_that_ends_is_an_error_with_its_words(tmp_path: Path) -> None:
    output = tmp_path / "torch.txt"
    output.write_text("out of luck\n")
    process = subprocess.Popen([sys.executable, "-c", ""], text=True)
    process.wait()
    team = comm.Team("allstep run", process, output, [io.StringIO()])
    with pytest.raises(CommFailed, match="out of luck"):
        team.request({"prepare": 4})


def test_a_size_that_does_not_fit_is_missing() -> None:
    assert comm.too_large(2, 4096) == ""
    assert "GB are free" in comm.too_large(2, 1 << 50)


@pytest.mark.parametrize("numel", [1, 61, 1000, 61 * 4096 + 5])
@pytest.mark.parametrize(("size", "turns"), [(2, 1), (2, 80), (4, 40), (3, 50)])
def test_sums_are_checked(numel: int, size: int, turns: int) -> None:
    ranks = torch.empty(size, numel)
    for rank in range(size):
        fill(ranks[rank], rank)
    total = ranks.sum(0)
    for _ in range(turns - 1):
        total *= size
    check(total, size, turns)
    total[-1] *= 1.001
    with pytest.raises(ArithmeticError, match="wrong sum"):
        check(total, size, turns)


class Alone(SumContender):
    """Sums over one rank, and keeps what the call finds."""

    def __init__(self) -> None:
        self.found: list[float] = []
        self.meetings = 0

    def empty(self, numel: int) -> torch.Tensor:
        return torch.empty(numel)

    def call(self, tensor: torch.Tensor) -> Callable[[], object]:
        return lambda: self.found.append(tensor[0].item()) or tensor.mul_(2)

    def meet(self) -> None:
        self.meetings += 1


@pytest.mark.parametrize(
    ("caches", "found", "evicted"), [(HOT, [1, 2, 4], 0), (WRITTEN, [1] * 3, 0), (COLD, [1] * 3, 3)]
)
def test_a_call_finds_the_caches_as_asked(
    caches: str, found: list[float], evicted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hot calls find the sum of the call before; the others their own values, rewritten before each
    call."""
    sums: list[int] = []
    monkeypatch.setattr(comm_rank.machine, "largest_cache", lambda: 400)
    monkeypatch.setattr(comm_rank, "check", lambda tensor, size, turns: None)
    alone = Alone()
    rank = CommRank(0, 1, {PRIVATE: alone})
    assert rank.answer({"prepare": 4000}) == {"absent": {}}
    evict = rank._evict
    rank._evict = lambda: sums.append(1) or evict()  # type: ignore[method-assign]
    seconds = rank.answer({"measure": PRIVATE, "calls": 3, "caches": caches})["seconds"]
    assert len(seconds) == 3 and min(seconds) > 0
    assert alone.found == found and len(sums) == evicted
    assert alone.meetings == (2 if caches == HOT else 6)  # before and after the timed part
    assert evicted == 0 or rank._ballast.numel() * 4 == 800


def test_cold_calls_have_targets_of_their_own() -> None:
    row = _row(2, MB, SHARED, 1e-4)
    cold = CommRow(2, MB, row.row, 1e-4, COLD)
    assert row.targets == {OPEN_MPI: 3} and cold.targets == {OPEN_MPI: 1}
    assert json.loads(CommResult((cold,), ()).to_json())["rows"][0]["caches"] == COLD


def test_targets() -> None:
    assert [RESULT.met(row) for row in RESULT.rows] == [True, None, False, True, None, None, None]
    assert RESULT.speed(RESULT.rows[0], GLOO) == pytest.approx(25)
    assert RESULT.unmet() == ["not met: 2 ranks, 100 MB, allstep, shared: 3x Open MPI and 6x Gloo"]


def test_the_table_fits_a_terminal() -> None:
    screen = io.StringIO()
    Console(width=80, file=screen).print(RESULT.table())
    lines = [line.split() for line in screen.getvalue().splitlines() if "KB" in line]
    assert lines == [
        [
            "4",
            "KB",
            "allstep,",
            "private",
            "8.00",
            "us",
            "7.00",
            "us",
            "9.00",
            "us",
            "25.00",
            "-",
            "met",
        ]
    ]
    assert "not met: 2 ranks, 100 MB, allstep, shared" in screen.getvalue()
    assert RESULT.absences() == ["missing: Open MPI, 4 ranks (it fails here)"]


def test_json_says_what_was_met() -> None:
    rows = json.loads(RESULT.to_json())["rows"]
    assert rows[2]["target"] == {OPEN_MPI: 3, GLOO: 6} and rows[2]["met"] is False
    assert rows[0]["speed"] == {GLOO: pytest.approx(25), OPEN_MPI: None}


def test_the_image(tmp_path: Path) -> None:
    file = tmp_path / "comm.png"
    RESULT.plot(file)
    assert file.read_bytes().startswith(b"\x89PNG")


def test_algorithms_stay_in_the_background_of_the_image() -> None:
    class Axes:
        """Keeps what is drawn."""

        def __init__(self) -> None:
            self.lines: dict[str, dict[str, object]] = {}
            self.bands: list[str] = []

        def plot(
            self, sizes: list[int], medians: list[float], *, label: str, **style: object
        ) -> None:
            self.lines[label] = {"sizes": sizes, "medians": medians, **style}

        def fill_between(self, *figures: object, color: str, **style: object) -> None:
            self.bands.append(color)

        def __getattr__(self, name: str) -> object:
            return lambda *args, **options: None

    algorithms = [f"allstep, {name}" for name in ALGORITHMS]
    rows = [
        _row(2, nbytes, name, 1.0, 3.0, 2.0)
        for nbytes in (4, 8)
        for name in (PRIVATE, GLOO, *algorithms)
    ]
    axes = Axes()
    CommResult((*rows, _row(4, 4, SHARED, 1.0)), ())._draw(axes, 2)
    assert list(axes.lines) == [PRIVATE, GLOO, *algorithms]
    assert all(
        line["sizes"] == [4, 8] and line["medians"] == [2.0, 2.0] for line in axes.lines.values()
    )
    thin = [axes.lines[name] for name in algorithms]
    assert {line["color"] for line in thin} == {"0.5"} and all(
        line["linewidth"] < 1 for line in thin
    )
    assert len({line["linestyle"] for line in thin}) == len(ALGORITHMS)
    assert axes.bands == [axes.lines[PRIVATE]["color"], axes.lines[GLOO]["color"]] == ["C1", "C2"]


def test_sizes_and_ranks_as_people_write_them() -> None:
    assert parse_sizes("4KB, 1M,2g,400") == [4096, 1 << 20, 2 << 30, 400]
    assert parse_ranks("2,4") == [2, 4]
    assert [parse_caches(word) for word in CACHES] == ["hot", "written", "cold"]
    with pytest.raises(ConfigError, match="--caches: 'warm' is not one of hot, written, cold"):
        parse_caches("warm")
    for wrong in ("", "4X", "3", "KB", "1.5MB", "-4KB"):
        with pytest.raises(ConfigError, match="--sizes"):
            parse_sizes(wrong)
    for wrong in ("", "1", "two"):
        with pytest.raises(ConfigError, match="--ranks"):
            parse_ranks(wrong)
