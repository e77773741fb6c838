"""`allstep bench step`: run once, tiny; failing contenders on a real rank; comparisons and the ways
out on figures made up."""

import contextlib
import io
import json
import mmap
import os
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import allstep
from allstep.bench import Missing
from allstep.bench.comm import measure as comm
from allstep.bench.step import measure as step
from allstep.bench.step import rank as step_rank
from allstep.bench.step.measure import StepFailed, StepRounds, check_losses, round_of
from allstep.bench.step.rank import CONTENDERS, MODELS, Lessons, StepRank, watching
from allstep.bench.step.result import (
    ALONE,
    DDP,
    GLOO,
    OPTIMIZER,
    PARTS,
    PUSHED,
    SHARED,
    TASKS,
    StepResult,
    StepRow,
)
from allstep.cli.app import app
from allstep.comm.timeline import recorder
from allstep.errors import ConfigError
from allstep.process.memory import written_nbytes
from support.ranks import Ranks, wait_until

TOGETHER = [GLOO, DDP, OPTIMIZER, SHARED]
RIVALS = [*TOGETHER, PUSHED]
MB = 1 << 20


@pytest.fixture
def forked(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Starts the bench's ranks in the fork server, where torch is imported already.

    A list of the commands that it stands in for.
    """
    commands: list[tuple[str, ...]] = []

    def start(
        name: str,
        command: tuple[str, ...],
        num_ranks: int,
        folder: Path,
        ending: contextlib.ExitStack,
    ) -> comm.Team:
        commands.append(command)
        *_, model, batch = command
        path = folder / "ranks.socket"
        door = ending.enter_context(socket.socket(socket.AF_UNIX))
        door.bind(str(path))
        door.listen(num_ranks)
        door.settimeout(100)
        pool = ending.enter_context(ThreadPoolExecutor(1))
        ended = pool.submit(ranks, num_ranks, step_rank.main, model, batch, str(path))
        ending.callback(lambda: ended.result(100))
        team = comm.Team(name, None, folder / "ranks.txt")  # type: ignore[arg-type]
        comm._gather(team, door, num_ranks, ending, 100)
        return team

    monkeypatch.setattr(step, "start_team", start)
    return commands


def test_everybody_trains_turn_by_turn(
    forked: list[tuple[str, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders: list[dict[str, Any]] = []
    request = comm.Team.request
    monkeypatch.setattr(
        comm.Team, "request", lambda team, order: orders.append(order) or request(team, order)
    )
    monkeypatch.setattr(step, "_SECONDS_PER_TURN", 0)
    file = tmp_path / "step.json"
    options = ["--model", "small-cnn", "--np", "2", "--batch", "3", "-r", "2", "--json", str(file)]
    outcome = CliRunner().invoke(app, ["bench", "step", *options])
    assert outcome.exit_code == 0, f"{outcome.output}\n{outcome.exception}"

    python = sys.executable
    rank = [python, "-P", "-m", "allstep.bench.step.rank", "small-cnn", "3"]
    assert forked == [[python, "-P", "-m", "allstep", "run", "-np", "2", *rank]]
    document = json.loads(file.read_text())
    assert document["benchmark"] == "step" and document["missing"] == []
    rows = {row["name"]: row for row in document["rows"]}
    assert list(rows) == [ALONE, *RIVALS] == list(CONTENDERS)
    trained = [order["train"] for order in orders if "train" in order]
    assert trained == [
        ALONE,
        *(GLOO, ALONE, DDP, OPTIMIZER, ALONE, SHARED, PUSHED, ALONE) * 3,
    ]  # the first round is the warm-up

    alone = rows[ALONE]["seconds"]
    assert len(alone) == 6
    for place, name in enumerate(RIVALS):
        row = rows[name]
        beside = alone[place // 2 :: 3]
        assert row["speeds"] == pytest.approx(
            [a / b for a, b in zip(beside, row["seconds"], strict=True)]
        )
        assert row["images_per_second"] == pytest.approx(2 * 3 * 3 / (sum(row["seconds"]) / 2))
        assert row["target"] is None  # nothing is promised for this batch
    _check_losses_of(rows)
    _check_parts_and_memory_of(rows)


def _check_losses_of(rows: dict[str, Any]) -> None:
    losses = {name: rows[name]["losses"] for name in TOGETHER}
    assert {len(each) for each in losses.values()} == {2 + 3 * 3}
    pushed = rows[PUSHED]["losses"]
    assert len(set(pushed)) == 11
    # The learning rate is low, so late gradients change the losses by little.
    assert pushed == pytest.approx(losses[GLOO], rel=0.05)
    with pytest.raises(StepFailed, match="do not learn the same"):
        check_losses({GLOO: losses[GLOO], PUSHED: pushed}, 2)
    check_losses(losses, 2)
    assert len(set(losses[GLOO])) == 11  # every step is another
    assert rows[ALONE]["losses"][0] == pytest.approx(
        losses[GLOO][0]
    )  # from the same weights, and then each for itself:
    with pytest.raises(
        StepFailed, match="do not learn the same"
    ):  # whoever does not communicate is found out
        check_losses({GLOO: losses[GLOO][2:5], ALONE: rows[ALONE]["losses"][5:8]}, 2)


def _check_parts_and_memory_of(rows: dict[str, Any]) -> None:
    for name in (DDP, OPTIMIZER, SHARED):
        assert set(PARTS) <= rows[name]["parts"].keys()
        assert all(seconds > 0 for seconds in rows[name]["parts"].values())
    for name in (ALONE, GLOO):
        assert list(rows[name]["parts"]) == ["updating"]
    copy = 4 * TASKS["small-cnn"].num_parameters
    assert 2.5 * copy < rows[ALONE]["bytes"] < 6 * copy  # weights, momentum, gradients


@pytest.mark.parametrize(
    "options",
    [
        ["--model", "alexnet2"],
        ["--model", "alexnet", "--np", "1024"],
        ["--model", "alexnet", "--np", "100000"],
    ],
)
def test_what_cannot_be_measured_is_said_at_once(
    options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(step, "start_team")
    outcome = CliRunner().invoke(app, ["bench", "step", *options])
    assert isinstance(outcome.exception, ConfigError)
    words = {
        "alexnet2": "choose one of alexnet, resnet18, small-cnn",
        "1024": "GB are free",
        "100000": "expected a number from 1 to 1024",
    }
    assert words[options[-1]] in str(outcome.exception)


# Contenders that fail


class _Team:
    """One rank, spoken to without a socket."""

    def __init__(self, rank: StepRank) -> None:
        self._rank, self.names = rank, rank.names

    def request(self, order: dict[str, Any]) -> list[dict[str, Any]]:
        return [json.loads(json.dumps(self._rank.answer(order)))]


def _not_there(model: Any, sgd: Any) -> Any:
    raise ImportError("no such part")


def _fails_in_turn(turn: int) -> Any:
    """Two steps prepare it, and a turn has three."""

    def wrap(model: Any, sgd: Any) -> Any:
        left = iter(range(2 + 3 * turn))

        def fragile(images: torch.Tensor) -> torch.Tensor:
            if next(left, None) is None:
                raise RuntimeError("worn out")
            return model(images)

        return fragile, sgd

    return wrap


def _rounds(contenders: dict[str, Any]) -> tuple[list[tuple[str, int, bool]], list[Missing]]:
    """Who was measured, in how many turns, and whether we saw where its time goes; and who is
    absent."""
    allstep.init()
    torch.set_num_threads(1)
    step._SECONDS_PER_TURN = 0
    rounds = StepRounds(_Team(StepRank(0, 1, "small-cnn", 2, contenders)), 1)  # type: ignore[arg-type]
    rounds.prepare()
    rounds.warm_up()
    rounds.take()
    rounds.watch()
    return [(row.name, len(row.seconds), bool(row.parts)) for row in rounds.rows()], rounds.absent()


def test_who_fails_is_missing_and_the_others_go_on(ranks: Ranks) -> None:
    alone = CONTENDERS[ALONE]
    contenders = {
        ALONE: alone,
        "absent": _not_there,
        "good": alone,
        "tired": _fails_in_turn(1),
        "spent": _fails_in_turn(2),
        "also good": alone,
    }
    [(rows, absent)] = ranks(1, _rounds, contenders)
    assert [(name, turns) for name, turns, _ in rows] == [(ALONE, 2), ("good", 1), ("also good", 1)]
    assert all(watched for *_, watched in rows)
    assert {each.name: each.reason for each in absent} == {
        "absent": "it fails here: ImportError: no such part",
        "tired": "it fails here: RuntimeError: worn out",
        "spent": "it fails here: RuntimeError: worn out",
    }


def _fail_on_one_rank() -> list[str]:
    """How a turn ends when rank 1 alone fails in it; and what a turn with somebody else gives
    afterwards."""
    world = allstep.init()
    torch.set_num_threads(1)
    contenders = {name: CONTENDERS[name] for name in (ALONE, OPTIMIZER, DDP)}
    if world.rank == 1:
        contenders[OPTIMIZER] = lambda *given: _fails_in_turn(0)(*CONTENDERS[OPTIMIZER](*given))
    rank = StepRank(world.rank, world.size, "small-cnn", 2, contenders)
    assert not any("failed" in rank.answer({"prepare": name}) for name in contenders)
    failed = rank.answer({"train": OPTIMIZER, "turn": 1, "steps": 3})["failed"]
    Path(f"answer of {world.rank}").touch()  # the bench, too, goes on when all have answered
    wait_until(Path(f"answer of {1 - world.rank}").exists)
    return [failed, *rank.answer({"train": DDP, "turn": 1, "steps": 3})]


def test_who_fails_on_one_rank_fails_on_all_and_the_others_go_on(ranks: Ranks) -> None:
    waited, worn_out = ranks(2, _fail_on_one_rank, env={"ALLSTEP_TIMEOUT": "5"})
    assert worn_out == ["RuntimeError: worn out", "seconds", "losses"]
    assert "rank 1 did not arrive within 5.0 s" in waited[0]
    assert waited[1:] == ["seconds", "losses"]


def test_all_reasons_are_given() -> None:
    answers = [
        {"failed": "rank 1 did not come"},
        {"failed": "worn out"},
        {"failed": "rank 1 did not come"},
    ]
    team = SimpleNamespace(names=[GLOO], request=lambda order: answers)
    rounds = StepRounds(team, 3)  # type: ignore[arg-type]
    with pytest.raises(StepFailed, match="it fails here: rank 1 did not come; worn out"):
        rounds.prepare()


@pytest.mark.parametrize(
    ("contenders", "words"),
    [
        (
            {ALONE: CONTENDERS[ALONE], GLOO: _not_there},
            "no contender can be measured: missing: DDP on Gloo",
        ),
        (
            {ALONE: _fails_in_turn(0), GLOO: CONTENDERS[ALONE]},
            "independent copies: RuntimeError: worn out",
        ),
    ],
)
def test_without_two_there_is_no_result(
    ranks: Ranks, contenders: dict[str, Any], words: str
) -> None:
    [outcome] = ranks.outcomes(1, _rounds, contenders)
    assert outcome.exit_code == 1
    assert "StepFailed: " in outcome.output and words in outcome.output


def test_every_rival_is_beside_the_independent_copies() -> None:
    assert round_of(TOGETHER) == [(GLOO, ALONE, DDP), (OPTIMIZER, ALONE, SHARED)]
    assert round_of(RIVALS[:3]) == [(GLOO, ALONE, DDP), (OPTIMIZER, ALONE)]


@pytest.mark.parametrize(
    ("step", "loss", "same"),
    [
        (2, 2.30001, {2: True, 3: True}),
        (2, 2.3001, {2: False, 3: False}),
        (7, 2.3001, {2: False, 3: True}),  # rounding of three numbers has grown
        (7, 2.6, {2: False, 3: False}),
        (7, float("nan"), {2: False, 3: False}),
    ],
)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_losses_that_differ_are_an_error(
    step: int, loss: float, same: dict[int, bool], num_ranks: int
) -> None:
    others = [2.3] * 8
    losses = {GLOO: others, DDP: others, SHARED: [*others[: step - 1], loss, *others[step:]]}
    words = rf"DDP on Gloo and share_weights .* at step {step} .* 2\.300000 and"
    with contextlib.nullcontext() if same[num_ranks] else pytest.raises(StepFailed, match=words):
        check_losses(losses, num_ranks)


# What a rank does


def test_tasks_are_those_of_the_nets() -> None:
    assert TASKS.keys() == MODELS.keys()
    for name, task in TASKS.items():
        with torch.device("meta"):
            model = MODELS[name]()
            assert model(torch.empty(2, *task.shape)).shape == (2, task.num_classes)
        assert sum(parameter.numel() for parameter in model.parameters()) == task.num_parameters


def test_lessons_are_the_same_for_all_contenders_and_others_for_each_rank_turn_and_step() -> None:
    def seen(rank: int, turn: int, lessons: Lessons | None = None) -> list[float]:
        lessons = lessons or Lessons(TASKS["small-cnn"], rank, 2, 4)
        return [
            value
            for images, _ in lessons.of(turn, 2)
            for value in (images.sum().item(), torch.rand(()).item())
        ]

    used = Lessons(TASKS["small-cnn"], 0, 2, 4)
    first = seen(0, 5, used)
    assert seen(0, 5, used) == first == seen(0, 5)
    everything = [*first, *seen(0, 6, used), *seen(1, 5), *seen(1, 6)]
    assert len(set(everything)) == len(everything)


@pytest.mark.usefixtures("processes")
def test_watching_adds_up_by_kind_and_ends() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(4))], 0.1)
    parts: dict[str, float] = defaultdict(float)

    def train() -> None:
        for _ in range(2):
            with recorder.operation("group", "all_reduce"):
                recorder.during(recorder.WAITING, time.sleep, 0.2)
            optimizer.step()

    with watching(parts):
        train()
    assert parts[recorder.WAITING] >= 0.4
    assert 0 < parts[recorder.MOVING] < parts[recorder.WAITING]
    assert 0 < parts["updating"] < 10
    assert recorder.active is None
    before = dict(parts)
    train()
    assert parts == before


@pytest.mark.usefixtures("processes")
def test_memory_that_two_share_counts_half() -> None:
    before = written_nbytes()
    private = torch.ones(16 * MB)
    alone = written_nbytes() - before
    assert 0.95 < alone / (64 * MB) < 1.05
    del private
    assert abs(written_nbytes() - before) < 4 * MB
    file = os.memfd_create("shared")
    os.truncate(file, 64 * MB)
    touch = (
        "import mmap, sys; m = mmap.mmap(int(sys.argv[1]), 0); m[:] = bytes(len(m)); print();"
        " sys.stdin.read()"
    )
    with (
        mmap.mmap(file, 64 * MB) as memory,
        subprocess.Popen(
            [sys.executable, "-c", touch, str(file)],
            pass_fds=[file],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as other,
    ):
        memory[:] = bytes(64 * MB)
        assert other.stdout and other.stdout.readline()
        assert 0.45 < (written_nbytes() - before) / (64 * MB) < 0.55
        other.communicate()
    os.close(file)


# What is shown


def _row(name: str, seconds: Sequence[float], speeds: Sequence[float], **parts: float) -> StepRow:
    return StepRow(name, seconds, speeds, [6.9, 6.8], 700 * MB, parts)


def _result(**changes: Any) -> StepResult:
    rows = [
        _row(ALONE, [4.0, 4.0, 3.8], [1.0, 1.0, 1.0], updating=0.08),
        _row(GLOO, [5.0, 5.1, 4.9], [0.8, 0.79, 0.82]),
        _row(
            OPTIMIZER,
            [4.1, 4.2, 4.1],
            [0.96, 0.94, 0.97],
            waiting=0.01,
            moving=0.02,
            adding=0.005,
            updating=0.08,
        ),
        _row(SHARED, [4.1, 4.1, 4.1], [0.98, 0.98, 0.99]),
    ]
    figures = {"model": "alexnet", "num_ranks": 2, "batch": 32, "steps": 4, "rows": rows}
    return StepResult(
        **{**figures, "missing": [Missing(DDP, "it fails here: worn out")], **changes}
    )


RESULT = _result()


def test_targets() -> None:
    assert [RESULT.met(row) for row in RESULT.rows] == [None, None, True, False]
    for changes in ({"num_ranks": 4}, {"batch": 16}):
        assert [_result(**changes).met(row) for row in RESULT.rows] == [None] * 4
    assert _result(model="small-cnn").met(RESULT.rows[3])


def test_comparisons() -> None:
    assert RESULT.images_per_second(RESULT.rows[0]) == pytest.approx(2 * 32 * 4 / 4.0)
    assert RESULT.step_seconds(RESULT.rows[2]) == pytest.approx(4.1 / 4)
    assert RESULT.lost(RESULT.rows[2]) == pytest.approx(4.1 * 0.04 / 4)


def test_the_table_fits_a_terminal() -> None:
    screen = io.StringIO()
    Console(width=80, file=screen).print(RESULT.table())
    lines = [line.split() for line in screen.getvalue().splitlines()]
    assert "alexnet, 2 ranks with 32 images each, turns of 4 steps" in screen.getvalue()
    assert ["DistributedOptimizer", "62.4", "96.0%", "94.0%", "97.0%", "95%", "met", "700"] in lines
    assert [
        "share_weights",
        "62.4",
        "98.0%",
        "98.0%",
        "99.0%",
        "98.5%",
        "not",
        "met",
        "700",
    ] in lines
    assert ["DistributedOptimizer", "1025.00", "41.00", "10.00", "20.00", "5.00", "80.00"] in lines
    assert ["DDP", "on", "Gloo", "1250.00", "250.00", "-", "-", "-", "-"] in lines
    assert RESULT.absences() == ["missing: DDP on allstep (it fails here: worn out)"]


def test_json_holds_every_figure() -> None:
    document = json.loads(RESULT.to_json())
    row = document["rows"][2]
    assert (row["model"], row["ranks"], row["batch"], row["steps"]) == ("alexnet", 2, 32, 4)
    assert (row["speed"], row["min"], row["max"]) == (0.96, 0.94, 0.97)
    assert (row["target"], row["met"], row["bytes"]) == (0.95, True, 700 * MB)
    assert row["parts"] == {"waiting": 0.01, "moving": 0.02, "adding": 0.005, "updating": 0.08}
    assert document["missing"] == [{"name": DDP, "reason": "it fails here: worn out"}]


def test_the_image(tmp_path: Path) -> None:
    file = tmp_path / "step.png"
    RESULT.plot(file)
    assert file.read_bytes().startswith(b"\x89PNG")
