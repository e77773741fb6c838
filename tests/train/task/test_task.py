"""The task interface: tasks with and without weights, with one worker and with several.

References: torch in one process, on the whole global batch.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import allstep
from allstep.data import Batch, Loader
from allstep.errors import CheckpointError, ConfigError
from allstep.train import read_config
from allstep.train.precision.precision import Precision
from allstep.train.run.progress import RunProgress
from allstep.train.run.setup import make_job
from allstep.train.score.evaluate import evaluate
from allstep.train.step import build
from allstep.train.step.after_step import AfterStep, StepReport
from allstep.train.step.running_statistics import RunningStatistics
from allstep.train.step.split_batch import split
from allstep.train.step.step import Clock, Trainer, step
from allstep.train.task.classification import Classification
from allstep.train.task.tally import Layout, Tally
from allstep.train.task.task import Losses, Sums, Task
from allstep.train.watch.events import Figures, Score
from support.array_sources import Arrays
from support.batches import batch_of
from support.ranks import Ranks
from support.scores import classified, classified_tally

RANDOM = np.random.default_rng(0)
WORDS, LENGTH, PADDING = 11, 6, -1
# Sentences of 1 to 6 tokens, filled with padding.
LENGTHS = RANDOM.integers(1, LENGTH + 1, 31)
TOKENS = np.where(np.arange(LENGTH) < LENGTHS[:, None], RANDOM.integers(0, WORDS, (31, LENGTH)), -1)
NEXT = np.where(np.arange(LENGTH) < LENGTHS[:, None], RANDOM.integers(0, WORDS, (31, LENGTH)), -1)


class Tokens(Task):
    """Predict a token for each token; padding does not count."""

    objective = ("perplexity", "min")
    tracked: ClassVar[tuple[str, ...]] = ("right",)

    def losses(self, model: nn.Module, batch: Batch) -> Losses:
        logits = model(batch.data.clamp(min=0))
        losses = functional.cross_entropy(
            logits.transpose(1, 2), batch.target, reduction="none", ignore_index=PADDING
        )
        return Losses(losses.sum(1), {"right": _right(logits, batch.target).sum()})

    def weights(self, batch: Batch) -> Tensor:
        return (batch.target != PADDING).sum(1)

    def sums(self, model: nn.Module, batch: Batch) -> Sums:
        logits = model(batch.data.clamp(min=0))
        known = batch.target != PADDING
        pairs = batch.target[known] * WORDS + logits.argmax(2)[known]
        confusion = torch.bincount(pairs, minlength=WORDS * WORDS).reshape(WORDS, WORDS)
        return {"confusion": confusion, "right": _right(logits, batch.target).sum()}

    def metrics(self, sums: Sums) -> Mapping[str, float]:
        found = {
            "perplexity": float(torch.exp(sums["loss"] / sums["weight"])),
            "right": float(sums["right"] / sums["weight"]),
        }
        if "confusion" in sums:
            found["trace"] = float(sums["confusion"].trace() / sums["confusion"].sum())
        return found


def _right(logits: Tensor, target: Tensor) -> Tensor:
    return (logits.argmax(2) == target) & (target != PADDING)


def made_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)).double()


UPDATES, BATCH = 20, 7


def train_tokens(num_micro_batches: int = 1) -> tuple[Score, Score, Score, list[float]]:
    """Train on batches of 7, every fifth of 3. Return scores before, in, after it, and weights."""
    world, task, model = allstep.init(), Tokens(), made_model()
    trainer = Trainer(
        model=model,
        task=task,
        optimizer=build.distribute(
            model, torch.optim.Adam(model.parameters(), 0.01), world, num_micro_batches, share=False
        ),
        lr=lambda seen: 0.01,
        to_input=lambda data: data,
        precision=Precision("float64", torch.device("cpu")),
        num_micro_batches=num_micro_batches,
        rank=world.rank,
        size=world.size,
    )
    loader = Loader(Arrays(TOKENS, NEXT), batch=BATCH, world=world, seed=1)
    after = AfterStep(RunningStatistics(model), world)
    before = evaluate(model, loader, trainer.to_input, task)
    seen = Tally.of_training(task)
    for number, batch in enumerate(loader.batches(0, 31 * UPDATES)):
        if number == UPDATES:
            break
        size = min(BATCH, 31 - batch.position % 31)
        mine = step(trainer, batch, size, Clock())
        seen = seen + after.exchange(StepReport(mine, batch.weight)).tally
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return before, seen.score(), evaluate(model, loader, trainer.to_input, task), weights.tolist()


def by_torch_alone() -> tuple[list[float], list[float]]:
    """Return the loss of each update and the weights after them, of plain torch."""
    model = made_model()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    losses = []
    loader = Loader(Arrays(TOKENS, NEXT), batch=BATCH, seed=1)
    for _, batch in zip(range(UPDATES), loader.batches(0, 31 * UPDATES), strict=False):
        logits = model(batch.data.clamp(min=0)).transpose(1, 2)
        loss = functional.cross_entropy(logits, batch.target, ignore_index=PADDING)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, torch.cat([each.detach().flatten() for each in model.parameters()]).tolist()


@pytest.mark.parametrize(("num_ranks", "num_micro_batches"), [(1, 1), (2, 2), (3, 1)])
def test_padding_counts_the_same_with_any_number_of_workers(
    ranks: Ranks, num_ranks: int, num_micro_batches: int
) -> None:
    _, expected = by_torch_alone()
    model = made_model()
    logits = model(torch.from_numpy(TOKENS).clamp(min=0)).detach()
    target = torch.from_numpy(NEXT)
    loss = functional.cross_entropy(logits.transpose(1, 2), target, ignore_index=PADDING).item()
    right = float((logits.argmax(2) == target)[target != PADDING].double().mean())
    for before, during, after, weights in ranks(num_ranks, train_tokens, num_micro_batches):
        assert weights == pytest.approx(expected, rel=1e-9, abs=1e-12)
        assert before.loss == pytest.approx(loss, rel=1e-12)
        assert before.perplexity == pytest.approx(np.exp(loss), rel=1e-9)
        assert (before.right, before.trace, before.count) == (right, right, 31)
        assert after.loss < before.loss
        # 20 updates are 4 epochs of 5 batches.
        assert during.count == 4 * 31 and set(during.metrics) == {"perplexity", "right"}


def test_parts_of_a_batch_are_whole_and_in_order() -> None:
    batch = batch_of(torch.arange(10).reshape(5, 2), torch.arange(5))
    parts = list(split(batch, 3))
    assert [part.weight for part in parts] == [2, 2, 1]
    assert torch.cat([part.data for part in parts]).equal(batch.data)
    assert torch.cat([part.target for part in parts]).equal(batch.target)
    assert np.concatenate([part.samples for part in parts]).tolist() == [0, 1, 2, 3, 4]
    assert [part.weight for part in split(batch, 7)] == [1, 1, 1, 1, 1, 0, 0]
    assert next(split(batch, 1)) is batch


class Means(Tokens):
    def losses(self, model: nn.Module, batch: Batch) -> Any:
        return super().losses(model, batch).values.mean()


class Changing(Tokens):
    def sums(self, model: nn.Module, batch: Batch) -> Sums:
        return {"per sample": torch.zeros(batch.weight)}


@pytest.mark.parametrize(
    ("task", "text"),
    [
        (Means(), r"task Means: losses has shape \(\) for 7 samples, expected \(7,\)"),
        (Changing(), r"task Changing: its sums are per sample \(3,\) for one batch and per sample"),
    ],
)
def test_a_wrong_task_is_named(ranks: Ranks, task: Task, text: str) -> None:
    (message,) = ranks(1, error_of, task)
    import re

    assert re.search(text, message), message


def error_of(task: Task) -> str:
    world = allstep.init()
    loader = Loader(Arrays(TOKENS, NEXT), batch=BATCH, world=world, seed=None)
    try:
        evaluate(made_model(), loader, lambda data: data, task)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("direction", ["min", "max"])
def test_an_objective_has_a_direction(direction: Any) -> None:
    figures = Figures("loss", direction)
    low, high = Score(0.1, 10), Score(0.2, 10)
    better, worse = (high, low) if direction == "max" else (low, high)
    assert figures.is_better(low, None) and figures.is_better(better, worse)
    assert not figures.is_better(worse, better) and not figures.is_better(low, low)
    assert figures.reaches(better, worse.loss) and figures.reaches(low, 0.1)
    assert not figures.reaches(worse, better.loss)


def test_the_best_is_the_tasks_best() -> None:
    progress = RunProgress(samples=10, batch=5, since=Tally.of_training(Tokens()))
    figures = Figures("perplexity", "min")
    scores = [Score(0.0, 10, {"perplexity": value}) for value in (3.0, 1.0, 2.0)]
    assert [progress.note(each, figures) for each in scores] == [True, True, False]
    assert (progress.best, progress.worse) == (scores[1], 1)
    plain = progress.to_plain()
    assert RunProgress.from_plain(plain, Tokens()).to_plain() == plain


def test_checkpoints_of_older_versions_and_of_other_tasks() -> None:
    plain = RunProgress(since=classified_tally(1.0, 2.0, 3.0, 4.0)).to_plain()
    older = {**plain, "since": [1.0, 2.0, 3.0, 4.0]}
    assert RunProgress.from_plain(older, Classification(3)).since.sums() == plain["since"]
    with pytest.raises(CheckpointError, match="belongs to a run of another task"):
        RunProgress.from_plain(plain, Tokens())


def test_a_score_has_its_metrics_as_attributes() -> None:
    score = classified(0.5, 0.9, 10, 0.99)
    assert (score.accuracy, score.top5) == (0.9, 0.99)
    assert Score.from_plain(score.to_plain()) == score
    with pytest.raises(AttributeError, match="no metric 'recall'"):
        _ = score.recall


def test_a_rank_without_samples_takes_the_layout_of_the_others() -> None:
    task = Tokens()
    full = Tally(task, Layout(("confusion",), ((2, 2),)))
    empty = Tally(task).with_layout([None, full.layout, None])
    assert empty.sums() == full.sums() == [0.0] * 7
    with pytest.raises(ConfigError, match="its sums are confusion"):
        Tally(task).with_layout([full.layout, Layout(("confusion",), ((3,),))])


def test_runs_are_classifications(tmp_path: Path, ranks: Ranks) -> None:
    (task,) = ranks(1, task_of, tmp_path)
    assert task == Classification(10, 0.1)
    assert task.figures().hidden == ("top5",)


def task_of(folder: Path) -> Any:
    world = allstep.init()
    config = read_config("digits", ["label_smoothing=0.1"]).resolved(1)
    return make_job(config, world, folder).trainer.task
