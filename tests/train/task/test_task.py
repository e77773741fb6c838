"""The task interface: training and evaluation work with a task besides classification."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import allstep
from allstep.data import Batch, Loader
from allstep.errors import DataError
from allstep.train import read_config
from allstep.train.precision.precision import Precision
from allstep.train.run.progress import RunProgress
from allstep.train.run.setup import make_job
from allstep.train.score.evaluate import evaluate
from allstep.train.step import build
from allstep.train.step.after_step import AfterStep, StepReport
from allstep.train.step.running_statistics import RunningStatistics
from allstep.train.step.step import Clock, Trainer, step
from allstep.train.task.classification import Classification
from allstep.train.task.task import Metric, Task
from allstep.train.watch.events import Score
from support.array_sources import Arrays
from support.ranks import Ranks

RANDOM = np.random.default_rng(0)
INPUTS = RANDOM.standard_normal((30, 1, 2, 3)).astype(np.float64)
TARGETS = INPUTS.reshape(30, 6) @ np.arange(1.0, 7.0)


@dataclass
class ErrorTally:
    """Sums of squared errors, and of absolute errors in place of an accuracy."""

    loss: float = 0.0
    absolute: float = 0.0
    count: float = 0.0

    def add(self, loss: Tensor, outputs: Tensor, target: Tensor) -> None:
        self.loss += float(loss)
        self.absolute += float((outputs[:, 0] - target).abs().sum())
        self.count += len(target)

    def __add__(self, other: "ErrorTally") -> "ErrorTally":
        return self.with_sums(
            [mine + theirs for mine, theirs in zip(self.sums(), other.sums(), strict=True)]
        )

    def sums(self) -> list[float]:
        return [self.loss, self.absolute, self.count]

    def with_sums(self, sums: Sequence[float]) -> "ErrorTally":
        return ErrorTally(*sums)

    def score(self) -> Score:
        count = max(1.0, self.count)
        return Score(self.loss / count, self.absolute / count, round(self.count))


@dataclass(frozen=True)
class Regression:
    """The task of predicting one number for each sample."""

    input: Literal["images"] = "images"
    metrics: tuple[Metric, ...] = (Metric("loss", higher_is_better=False),)

    def tally(self) -> ErrorTally:
        return ErrorTally()

    def training_losses(self, outputs: Tensor, target: Tensor) -> Tensor:
        return (outputs[:, 0] - target) ** 2

    def loss_sum(self, outputs: Tensor, target: Tensor) -> Tensor:
        return self.training_losses(outputs, target).sum()

    def check_targets(self, batch: Batch, loader: Loader) -> None:
        if len(batch.target) and not batch.target.isfinite().all():
            raise DataError("a target is not finite")


def learn(updates: int = 60) -> tuple[Score, Score, list[float]]:
    """Train the regression. Return the first and the last score, and the weights."""
    world = allstep.init()
    task: Task = Regression()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(6, 1)).double()
    trainer = Trainer(
        model=model,
        task=task,
        optimizer=build.distribute(
            model, torch.optim.SGD(model.parameters(), 0.1), world, 1, share=False
        ),
        lr=lambda seen: 0.1,
        to_input=lambda data: data,
        precision=Precision("float64", torch.device("cpu")),
        rank=world.rank,
        size=world.size,
    )
    loader = Loader(Arrays(INPUTS, TARGETS), batch=7, world=world, seed=1)
    after = AfterStep(RunningStatistics(model), world)
    before = evaluate(model, loader, trainer.to_input, task)
    seen = task.tally()
    for number, batch in enumerate(loader.batches(0, 30 * updates)):
        if number == updates:
            break
        size = min(7, 30 - batch.position % 30)
        seen = (
            seen
            + after.exchange(StepReport(step(trainer, batch, size, Clock()), batch.weight)).tally
        )
    assert seen.count > 0
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return before, evaluate(model, loader, trainer.to_input, task), weights.tolist()


def test_a_regression_learns_the_same_with_any_number_of_workers(ranks: Ranks) -> None:
    ((before, after, weights),) = ranks(1, learn)
    assert before.loss > 10 and after.loss < 1e-3 and after.count == 30
    assert weights == pytest.approx([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 0.0], abs=0.05)
    for first, last, others in ranks(3, learn):
        assert (first.loss, last.loss) == pytest.approx((before.loss, after.loss), rel=1e-9)
        assert others == pytest.approx(weights, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("higher", [False, True])
def test_a_metric_knows_its_direction(higher: bool) -> None:
    metric = Metric("loss", higher)
    low, high = Score(0.1, 0.5, 10), Score(0.2, 0.5, 10)
    better, worse = (high, low) if higher else (low, high)
    assert metric.is_better(low, None) and metric.is_better(better, worse)
    assert not metric.is_better(worse, better) and not metric.is_better(low, low)
    assert metric.reaches(better, metric.of(worse)) and metric.reaches(low, 0.1)
    assert not metric.reaches(worse, metric.of(better))


def test_the_best_is_the_tasks_best() -> None:
    progress = RunProgress(samples=10, batch=5, since=ErrorTally(1.0, 2.0, 3.0))
    metric = Regression().metrics[0]
    assert [progress.note(Score(loss, 0.0, 10), metric) for loss in (3.0, 1.0, 2.0)] == [
        True,
        True,
        False,
    ]
    assert (progress.best, progress.worse, progress.since) == (Score(1.0, 0.0, 10), 1, ErrorTally())
    assert RunProgress.from_plain(progress.to_plain(), Regression()) == progress


def test_runs_are_classifications(tmp_path: Path, ranks: Ranks) -> None:
    (task,) = ranks(1, task_of, tmp_path)
    assert task == Classification(10, 0.1)
    assert [metric.name for metric in task.metrics] == ["accuracy", "top5", "loss"]


def task_of(folder: Path) -> Any:
    world = allstep.init()
    config = read_config("digits", ["label_smoothing=0.1"]).resolved(1)
    return make_job(config, world, folder).trainer.task
