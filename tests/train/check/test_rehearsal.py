"""Checks before a long run, `--overfit N` and `--dry-run`: they find errors, name them, and leave
no files.
"""

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import allstep
from allstep.cli.app import app
from allstep.errors import CheckpointError, UserError
from allstep.train import read_config
from allstep.train.check import overfit as by_heart
from allstep.train.check.dry_run import (
    Rehearsed,
    RehearsedStage,
    _check_same,
    forecast,
    rehearse,
    table,
)
from allstep.train.check.overfit import Learned, learn, simplified, verdict
from allstep.train.checkpoint.write_and_read import Snapshot
from allstep.train.run import setup as job
from allstep.train.task.classification import Classification
from allstep.train.watch.events import Score
from support.ranks import clean_environment
from support.scores import classified

STAGES = ["start", "data", "step", "evaluate", "save", "load"]

# By heart


def learned_on(overrides: list[str], count: int, epochs: int) -> tuple[Learned, list[str]]:
    world = allstep.init()
    torch.set_num_threads(1)  # threads that spin for each other starve on a busy machine
    config, _ = simplified(read_config("digits", overrides).resolved(world.size), count)
    lines: list[str] = []
    schedule = config.schedule.model_copy(update={"warmup": min(config.schedule.warmup, epochs)})
    shorter = config.model_copy(update={"epochs": epochs, "schedule": schedule})
    return learn(shorter, world, Path.cwd(), lines.append), lines


def test_a_model_learns_by_heart_with_any_number_of_workers(ranks: Any) -> None:
    ((alone, lines),) = ranks(1, learned_on, ["model.options.hidden=32"], 13, by_heart.EPOCHS)
    assert alone.by_heart
    assert (alone.samples, alone.last.count) == (13, 13)
    assert alone.evaluated is not None
    assert alone.evaluated.accuracy == 1
    assert lines[0].startswith("epoch 1: loss 2.")
    both = ranks(2, learned_on, ["model.options.hidden=32"], 13, by_heart.EPOCHS)
    assert both[0][0] == both[1][0]
    assert abs(both[0][0].steps - alone.steps) <= 2  # rounding


def test_a_model_that_cannot_learn_does_not(ranks: Any) -> None:
    overrides = ["optimizer.lr=1e-9", "model=lenet", "model.options.dropout=0.5"]
    ((learned, lines),) = ranks(1, learned_on, overrides, 20, 3)
    assert not learned.by_heart
    assert (learned.steps, learned.epochs) == (3, 3)
    assert lines[0] == "switched off: dropout in 1 layer"
    assert "whether gradients reach its weights" in verdict(learned)


def test_what_prevents_learning_is_switched_off_and_reported() -> None:
    overrides = [
        "data.augment=Flip()",
        "label_smoothing=0.1",
        "ema.decay=0.9",
        "batch=512",
        "accumulation=100",
    ]
    config, off = simplified(read_config("digits", overrides).resolved(1), 64)
    assert off == [
        "data.augment=Flip()",
        "label_smoothing=0.1",
        "optimizer.weight_decay=0.0005",
        "ema.decay=0.9",
    ]
    assert (config.overfit, config.batch, config.accumulation, config.label_smoothing) == (
        64,
        64,
        64,
        0.0,
    )
    assert (config.data.augment, config.optimizer.weight_decay, config.ema.decay) == (
        "none",
        0.0,
        None,
    )
    assert config.schedule.shape == "constant"


@pytest.mark.parametrize(
    ("first", "last", "text"),
    [
        (
            classified(2.3, 0.1, 64, 0.5),
            classified(0.09, 1.0, 64, 1.0),
            "learned 64 samples by heart after 90 steps",
        ),
        (classified(2.3, 0.1, 64, 0.5), classified(0.05, 0.98, 64, 1.0), "have different labels"),
        (
            classified(2.3, 0.1, 64, 0.5),
            classified(math.nan, 0.1, 64, 0.5),
            "the learning rate, which is too high",
        ),
        (
            classified(2.3, 0.1, 64, 0.5),
            classified(9.0, 0.1, 64, 0.5),
            "the learning rate, which is too high",
        ),
        (classified(2.3, 0.1, 64, 0.5), classified(2.29, 0.1, 64, 0.5), "guessing, which is 2.3"),
        (
            classified(2.3, 0.1, 64, 0.5),
            classified(1.0, 0.6, 64, 0.9),
            "too small for so many samples",
        ),
    ],
)
def test_the_verdict_goes_by_the_figures(first: Score, last: Score, text: str) -> None:
    line = verdict(Learned(Classification(10), 64, 90, 90, first, last))
    assert text in line
    assert "\n" not in line


def test_a_model_that_evaluates_worse_is_reported() -> None:
    good = classified(0.05, 1.0, 64, 1.0)
    line = verdict(
        Learned(Classification(10), 64, 90, 90, good, good, classified(0.9, 0.75, 64, 1.0))
    )
    assert "in evaluation mode loss 0.9, accuracy 75.0%" in line


# A dry run


def rehearsed_on(overrides: list[str], broken: str = "") -> Rehearsed | str:
    """Return the result of a dry run, or the text of its error."""
    world = allstep.init()
    torch.set_num_threads(1)  # threads that spin for each other starve on a busy machine
    out = Path.cwd()
    if broken == "save" and world.rank == 0:
        (out / "checkpoints").touch()
    if broken == "load":
        job.load_optimizer = lambda optimizer, snapshot: None
    if broken == "data":
        job.open_splits = _with_a_class_less  # type: ignore[assignment]
    try:
        return rehearse(read_config("digits", overrides).resolved(world.size), world, out)
    except (UserError, SystemExit) as error:
        return str(error)


def _with_a_class_less(config: Any) -> Any:
    from dataclasses import replace

    from allstep.train.input.splits import open_splits

    splits = open_splits(config)
    return replace(splits, classes=splits.classes[:9])


@pytest.mark.parametrize(
    "overrides",
    [
        ["ema.decay=0.9", "optimizer=lamb", "model=lenet", "model.norm=batch"],
        ["share_weights=true"],
    ],
)
def test_every_stage_is_rehearsed(ranks: Any, overrides: list[str]) -> None:
    first, second = ranks(2, rehearsed_on, overrides)
    assert [stage.name for stage in first.stages] == STAGES
    assert first.stages == second.stages
    assert first.stages[-1].what.endswith("tensors, the same bits")
    assert all(stage.memory > 0 for stage in first.stages)
    assert (first.epochs, first.steps_per_epoch, first.fits) == (150, 21, True)
    assert first.step_seconds > 0


@pytest.mark.parametrize(
    ("broken", "complaint"),
    [
        ("data", "its label is 9, the model's classes are 0 to 8"),
        ("save", "cannot be written"),
        ("load", "/momentum_buffer differs in a run that resumes from it"),
    ],
)
def test_the_stage_that_fails_is_named(ranks: Any, broken: str, complaint: str) -> None:
    (error,) = ranks(1, rehearsed_on, [], broken)
    assert error.startswith(f"dry run, stage '{broken}': ")
    assert complaint in error


def snapshot(**changes: Any) -> Snapshot:
    same: dict[str, Any] = {
        "samples": 5,
        "weights": {"w": torch.tensor([1.0, math.nan])},
        "optimizer": {},
        "state": {"rate": 0.1},
    }
    return Snapshot(**{**same, **changes})


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"weights": {"w": torch.tensor([1.0 + 2**-23, math.nan])}}, "the weight w differs"),
        ({"weights": {"w": torch.tensor([1.0, math.nan]).double()}}, "the weight w differs"),
        ({"weights": {}}, "the weight w differs"),
        ({"optimizer": {"w/step": torch.ones(1)}}, "the optimizer's w/step differs"),
        ({"state": {"rate": 0.2}}, "'rate' of its state differs"),
    ],
)
def test_one_bit_is_enough(changes: dict[str, Any], what: str) -> None:
    _check_same("itself", snapshot(), snapshot(weights={"w": torch.tensor([1.0, math.nan])}))
    with pytest.raises(CheckpointError, match=what):
        _check_same("the file", snapshot(), snapshot(**changes))


REHEARSED = Rehearsed(
    stages=(RehearsedStage("start", "a model", 1.5, 400_000_000),),
    epochs=90,
    steps_per_epoch=157,
    step_seconds=0.5,
    evaluations=91,
    evaluation_seconds=30.0,
    checkpoint_nbytes=200_000_000,
    checkpoints=5,
    free_nbytes=900_000_000,
)


def test_a_whole_run_is_forecast() -> None:
    time_line, disk_line = forecast(REHEARSED)
    assert time_line.startswith(
        "a whole run: 90 epochs x 157 steps x 500 ms = 1 h 58 min, and 91 evaluations of 30 s: 2 h"
        " 43 min in total"
    )
    assert disk_line.startswith(
        "disk: up to 5 checkpoints of 200 MB = 1 GB; 900 MB are free, which is too little"
    )
    assert not REHEARSED.fits
    assert list(table(REHEARSED))[1] == ["start", "1.50", "400 MB", "a model"]


# As the user types it


def train(*overrides: str, folder: Path) -> subprocess.CompletedProcess[str]:
    env = {**clean_environment(), "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
    command = [sys.executable, "-m", "allstep", "train", "digits", *overrides]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=170)


def left_in(folder: Path) -> list[str]:
    """Return the names in a folder, without torch's cache."""
    return [name for name in os.listdir(folder) if not name.startswith("torchinductor")]


@pytest.mark.usefixtures("processes")
def test_a_dry_run(tmp_path: Path) -> None:
    done = train("--dry-run", "--workers", "1", "--out", "deep/down", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "dry run with 1 worker"
    assert [line.split()[0] for line in lines[2:8]] == STAGES
    assert lines[8].startswith("a whole run: 150 epochs x 21 steps x ")
    assert left_in(tmp_path) == []


@pytest.mark.usefixtures("processes")
def test_what_cannot_be_learned_is_exit_status_1_and_no_failure_of_a_worker(tmp_path: Path) -> None:
    done = train("--overfit", "9", "optimizer.lr=1e-9", "--workers", "1", folder=tmp_path)
    assert done.returncode == 1
    assert done.stderr == ""
    assert (
        "did not learn 9 samples by heart in 200 steps (200 epochs): the loss is 2."
        in done.stdout.splitlines()[-1]
    )
    assert left_in(tmp_path) == []


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (
            ["--overfit", "9999"],
            "config key 'overfit': expected 1 to 1294 training samples, found 9999",
        ),
        (["--overfit", "8", "--dry-run"], "--overfit and --dry-run are two tests"),
        (["--dry-run", "--out", "/proc/nothing/at/all"], "/proc: cannot be written"),
    ],
)
def test_bad_input_is_reported_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], complaint: str
) -> None:
    monkeypatch.chdir(tmp_path)
    error = CliRunner().invoke(app, ["train", "digits", *overrides]).exception
    assert isinstance(error, UserError)
    assert complaint in str(error)
    assert left_in(tmp_path) == []
