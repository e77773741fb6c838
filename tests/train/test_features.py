"""Options of a run: each in a complete run on the digits, with a reference if there is one."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import allstep
import allstep.torch as hvd
from allstep import runlog
from allstep.data import Batch, Loader
from allstep.norm import GhostBatchNorm, SyncBatchNorm
from allstep.train import read_config
from allstep.train.checkpoint import write_and_read as checkpoint
from allstep.train.precision.precision import Precision
from allstep.train.run import setup as job
from allstep.train.run.loop import train
from allstep.train.step import build
from allstep.train.step.step import accumulate_gradients
from allstep.train.task.classification import Classification
from allstep.train.watch.callback import Callback
from allstep.train.watch.events import Result
from allstep.train.watch.record_callback import Record
from support.array_sources import Arrays
from support.ranks import Outcome

# float32, not auto: the figures are compared with each other, and are the same on every CPU.
SHORT = ["precision=float32", "epochs=3", "data.validation=100", "log_every=5", "batch=100"]
SHORT += ["save.seconds=null", "save.epochs=null"]


def run(overrides: list[str], *more: Callback) -> tuple[Result, dict[str, np.ndarray], Path]:
    """Train a run. Return its result and the weights of its last checkpoint."""
    world = allstep.init()
    out = Path.cwd() / "out"
    callbacks = [Record(runlog.RunLog(out / "run.jsonl")), *more] if world.rank == 0 else []
    result = train(read_config("digits", [*SHORT, *overrides]), world, out, callbacks)
    assert isinstance(result, Result)
    weights = {}
    if world.rank == 0:
        newest = checkpoint.newest(out / "checkpoints").snapshot
        assert newest is not None
        weights = {name: tensor.double().numpy() for name, tensor in newest.weights.items()}
    return result, weights, out


def assert_close(
    ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray], tolerance: float
) -> None:
    assert sorted(ours) == sorted(theirs)
    for name, tensor in ours.items():
        np.testing.assert_allclose(
            tensor, theirs[name], rtol=tolerance, atol=tolerance, err_msg=name
        )


@pytest.mark.parametrize(
    "overrides",
    [
        ["optimizer=lars", "optimizer.lr=1", "optimizer.scaling=none", "share_weights=true"],
        ["optimizer=lamb", "optimizer.lr=0.01", "optimizer.clip=0.5", "optimizer.noise=0.01"],
        [
            "optimizer=adamw",
            "optimizer.lr=0.001",
            "optimizer.clip=0.5",
            "share_weights=true",
            "accumulation=3",
        ],
        [
            "optimizer=larc",
            "optimizer.lr=0.1",
            "optimizer.noise_like=10",
            "schedule.shape=polynomial",
        ],
        [
            "optimizer=novograd",
            "optimizer.lr=0.01",
            "growth.at=[1]",
            "schedule.shape=constant",
            "label_smoothing=0.1",
        ],
        [
            "model.norm=sync",
            "ema.decay=0.9",
            "data.augment=PadAndCrop(8, pad=1)",
            "optimizer.bias_lr=2",
        ],
    ],
    ids=lambda overrides: overrides[0],
)
def test_three_workers_compute_what_one_does(ranks: Any, overrides: list[str]) -> None:
    """In float64, so that nothing but rounding differs."""
    overrides = [*overrides, "precision=float64", "epochs=2"]
    ((alone, weights, _),) = ranks(1, run, overrides)
    (together, shared, _), *_ = ranks(3, run, overrides)
    assert_close(shared, weights, 1e-9)
    assert together.test.loss == pytest.approx(alone.test.loss, rel=1e-9)


def test_bfloat16_is_near_float32(ranks: Any) -> None:
    ((exact, _, _),) = ranks(1, run, [])
    ((rough, _, _),) = ranks(1, run, ["precision=bfloat16"])
    assert rough.test.loss != exact.test.loss
    assert rough.test.loss == pytest.approx(exact.test.loss, rel=0.15)


def test_it_ends_early_and_tests_the_best(ranks: Any) -> None:
    """Sixty evaluations on 100 samples: two in a row without a new best one come before the end."""
    overrides = [
        "epochs=12",
        "evaluation.every=0.2",
        "evaluation.patience=2",
        "evaluation.weights=best",
        "save.keep=1",
    ]
    result, _, out = ranks(2, run, [*overrides, "schedule.shape=constant"])[0]
    record = runlog.read(out / "run.jsonl")
    scores = [line["accuracy"] for line in record.evals if line["part"] == "validation"]
    assert result.best is not None
    assert result.best.accuracy == max(scores)
    assert scores.index(max(scores)) == len(scores) - 3, "two evaluations without a better one"
    assert (result.chosen, len(scores) < 60) == ("best", True)
    assert "evaluation.patience" in result.why
    kept = [path.name for path in checkpoint.written(out / "checkpoints")]
    assert len(kept) == 2, "the last and the best"


def test_it_stops_at_an_accuracy(ranks: Any) -> None:
    result, _, out = ranks(
        1, run, ["epochs=20", "evaluation.every=0.5", "evaluation.stop_at=0.6", "batch=50"]
    )[0]
    scores = [
        line["accuracy"]
        for line in runlog.read(out / "run.jsonl").evals
        if line["part"] == "validation"
    ]
    assert scores[-1] >= 0.6 > max(scores[:-1])
    assert (
        result.samples == len(scores) * 1337 // 2
        or abs(result.samples - len(scores) * 1337 / 2) < 50
    )


class Meddler(Callback):
    """A callback that changes a weight of rank 0 only."""

    def progress(self, progress: Any) -> None:
        if progress.samples > 300:
            import gc

            model = next(each for each in gc.get_objects() if type(each).__name__ == "SmallCnn")
            with torch.no_grad():
                next(model.parameters()).view(-1)[0] += 1e-3


def run_with_meddler() -> None:
    from allstep.train.run import loop as running

    running._COMPARE_EVERY = 8
    run([], Meddler())


def test_weights_that_part_are_found(ranks: Any) -> None:
    outcomes = ranks.outcomes(2, run_with_meddler)
    assert all(outcome.exit_code != 0 for outcome in outcomes)
    assert any("features.0.0.weight" in outcome.output for outcome in outcomes)


def run_with_noise(overrides: list[str]) -> tuple[list[float], str]:
    """Return the progress events and the last event of a run."""
    run(["noise_scale=true", "log_every=1", *overrides])
    if dist.get_rank() > 0:
        return [], ""
    record = runlog.read(Path.cwd() / "out" / "run.jsonl")
    return [line["noise_scale"] for line in record.steps if "noise_scale" in line], record.events[
        -1
    ]["text"]


def test_the_noise_scale_is_measured_by_workers_and_by_micro_batches(ranks: Any) -> None:
    by_workers, advice = ranks(2, run_with_noise, [])[0]
    by_micro_batches, advice_of_one = ranks(1, run_with_noise, ["accumulation=2"])[0]
    assert len(by_workers) > 20
    for message in (advice, advice_of_one):
        assert re.match(
            r"noise scale about \d+ samples \(95%: \d+ to \d+\); batch 100 needs", message
        )
    for scales in (by_workers, by_micro_batches):
        assert 1 < np.median(scales[10:]) < 2000, (
            "digits are learned with batches of tens to hundreds"
        )
    assert np.median(by_workers[10:]) == pytest.approx(np.median(by_micro_batches[10:]), rel=0.5)


def trained_on_labels(labels: list[int]) -> None:
    from allstep import data

    real = data.ArraySource

    class Mislabelled(real):  # type: ignore[misc, valid-type]
        def __init__(self, images: Any, numbers: Any, **more: Any) -> None:
            numbers = numbers.copy()
            numbers[labels[0]] = labels[1]
            super().__init__(images, numbers, **more)

    data.ArraySource = Mislabelled
    run([])


def assert_rank_0_reports(sentence: str, outcomes: list[Outcome]) -> None:
    assert all(outcome.exit_code != 0 for outcome in outcomes)
    assert re.search(sentence, outcomes[0].output), outcomes[0].output
    assert "DataError" not in outcomes[1].output, "one line is enough"


def test_a_label_outside_the_classes_is_named(ranks: Any) -> None:
    sentence = (
        r"DataError: sample 17 of \S*: its label is 12, expected 0 to 9: correct the labels, or set"
        r" data\.num_classes"
    )
    assert_rank_0_reports(sentence, ranks.outcomes(2, trained_on_labels, [17, 12]))


def trained_with_a_class_less() -> None:
    """Train with labels that are unknown before they are read, as in records."""
    opened = job.open_splits
    job.open_splits = lambda config: replace(parts := opened(config), classes=parts.classes[:9])
    run([])


def test_a_label_found_in_a_step_is_named(ranks: Any) -> None:
    sentence = (
        r"DataError: sample \d+ \(.*\): its label is 9, the model's classes are 0 to 8; correct the"
        r" labels"
    )
    assert_rank_0_reports(sentence, ranks.outcomes(2, trained_with_a_class_less))


def run_and_resume(
    overrides: list[str], memory: int | None = None
) -> tuple[checkpoint.Snapshot, checkpoint.Snapshot]:
    """Return the last checkpoint of a run, and that of a run resumed from its middle, where a
    worker has that much memory."""
    world = allstep.init()
    config = read_config("digits", [*SHORT, "save.epochs=0.3", "save.keep=99", *overrides])
    first, second = Path.cwd() / "first", Path.cwd() / "second"
    train(config, world, first)
    whole = checkpoint.written(first / "checkpoints")
    middle = checkpoint.read(whole[len(whole) // 2])
    if memory is not None:
        job.memory_of_worker = lambda world, device: memory
    train(config, world, second, snapshot=middle)
    return checkpoint.read(whole[0]), checkpoint.read(checkpoint.written(second / "checkpoints")[0])


@pytest.mark.parametrize(
    "overrides",
    [
        ["optimizer=lamb", "optimizer.lr=0.01", "share_weights=true"],
        [
            "growth.at=[0.5,1]",
            "schedule.shape=constant",
            "accumulation=2",
            "model.norm=ghost",
            "model.ghost=8",
        ],
        ["precision=float16", "optimizer.clip=1", "optimizer.noise=0.01", "noise_scale=true"],
        [
            "growth.by_noise=true",
            "schedule.shape=constant",
            "batch=20",
            "optimizer=larc",
            "share_weights=true",
        ],
    ],
    ids=lambda overrides: overrides[0],
)
def test_a_resumed_run_has_the_same_bits(ranks: Any, overrides: list[str]) -> None:
    whole, resumed = ranks(2, run_and_resume, overrides)[0]
    assert whole.samples == resumed.samples
    assert whole.state == resumed.state
    for ours, theirs in ((whole.weights, resumed.weights), (whole.optimizer, resumed.optimizer)):
        assert sorted(ours) == sorted(theirs)
        for name, tensor in ours.items():
            assert torch.equal(tensor, theirs[name]), name


def test_a_batch_grows_by_larger_micro_batches_where_there_is_memory_and_resumes_where_there_is_not(
    ranks: Any,
) -> None:
    """To the same bits: the checkpoint stores the number of samples at once.

    Fewer micro-batches would add up in another order.
    """
    overrides = ["growth.at=[0.5]", "growth.factor=4", "schedule.shape=constant", "epochs=1"]
    whole, resumed = ranks(1, run_and_resume, overrides, 1)[0]
    assert whole.state["growth"]["room"] > 400, "a batch of 400 samples of 8x8 pixels"
    assert whole.state == resumed.state
    for name, tensor in whole.weights.items():
        assert torch.equal(tensor, resumed.weights[name]), name
    ((_, counts, batches),) = ranks(1, run_with_micro_batches, overrides)
    assert (set(counts), max(batches)) == ({1}, 400)
    ((_, counts, _),) = ranks(
        1, run_with_micro_batches, [*overrides, "model.norm=batch", "batch=50"]
    )
    assert set(counts) == {1, 4}, "batch norms see as many samples as at the beginning"


def run_with_micro_batches(overrides: list[str]) -> tuple[Result, list[int], list[int]]:
    """Train a run. Return its result, and the micro-batches and the batch of each step."""
    from allstep.train.run.rounds import each_step as running

    counts, batches, step = [], [], running.reduce_step

    def noted(trainer: Any, batch: Any, num_samples: int, clock: Any) -> Any:
        counts.append(trainer.num_micro_batches)
        batches.append(num_samples)
        return step(trainer, batch, num_samples, clock)

    running.reduce_step = noted
    return run(overrides)[0], counts, batches


def test_noise_follows_a_batch_that_grows() -> None:
    """The variance of the weights is batch / like - 1 for the batch of the step, so that the
    gradient's noise stays that of 10."""
    weigh = build.make_weigh(read_config("digits", ["optimizer.noise_like=10", "batch=50"]))
    assert weigh is not None
    nothing, samples = torch.zeros(0), np.arange(40_000)
    batch = Batch(nothing, nothing, samples, len(samples), epoch=1, position=0)
    for num_samples, variance in ((50, 4.0), (400, 39.0), (10, 0.0), (3, 0.0)):
        weights = weigh(batch, num_samples).double()
        assert weights.mean().item() == pytest.approx(
            1.0, abs=5 * (variance / 40_000) ** 0.5 + 1e-6
        )
        assert weights.var().item() == pytest.approx(variance, rel=0.05)


def meeting_gradients(size: int) -> list[np.ndarray]:
    """Return gradients of a batch of 2 samples with ghost batches over workers; a third rank has
    no samples."""
    world = allstep.init()
    hvd.init()
    model = communicating_model(GhostBatchNorm(4, 8, across_workers=True)).double()
    batches = Loader(Arrays(*two_samples()), batch=2, seed=1, world=world).batches()
    trainer = job.Trainer(
        model=model,
        task=Classification(3),
        optimizer=hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), 0.1), model.named_parameters()
        ),
        lr=lambda seen: 0.1,
        to_input=lambda x: x,
        precision=Precision("float64", torch.device("cpu")),
        size=size,
    )
    assert trainer.layers_communicate
    accumulate_gradients(trainer, next(iter(batches)), 2)
    trainer.optimizer.synchronize()
    return [
        parameter.grad.numpy() for parameter in model.parameters() if parameter.grad is not None
    ]


def two_samples() -> tuple[np.ndarray, np.ndarray]:
    return np.random.default_rng(0).standard_normal((2, 1, 8, 8)), np.array([3, 7])


def communicating_model(norm: torch.nn.Module) -> torch.nn.Module:
    torch.manual_seed(0)
    layers = torch.nn.Conv2d(1, 4, 3), norm, torch.nn.Flatten(), torch.nn.Linear(4 * 36, 10)
    return torch.nn.Sequential(*layers)


def test_a_rank_without_samples_participates_where_norms_communicate(ranks: Any) -> None:
    """Else the others would wait for it. Reference: torch's batch norm over both samples."""
    model = communicating_model(torch.nn.BatchNorm2d(4)).double()
    images, labels = (torch.from_numpy(each) for each in two_samples())
    torch.nn.functional.cross_entropy(model(images), labels).backward()
    for gradients in ranks(3, meeting_gradients, 3):
        for ours, theirs in zip(gradients, model.parameters(), strict=True):
            np.testing.assert_allclose(ours, theirs.grad.numpy(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("norm", "meet"),
    [
        (torch.nn.SyncBatchNorm(3), True),
        (SyncBatchNorm(3), True),
        (GhostBatchNorm(3, 8, across_workers=True), True),
        (GhostBatchNorm(3, 8), False),
        (torch.nn.BatchNorm2d(3), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_which_norms_meet(norm: torch.nn.Module, meet: bool) -> None:
    trainer = job.Trainer(
        model=torch.nn.Sequential(norm),
        task=Classification(3),
        optimizer=None,
        lr=lambda seen: 0.1,
        to_input=lambda x: x,
        precision=Precision("float32", torch.device("cpu")),
    )
    assert trainer.layers_communicate == meet


def test_float16_is_near_float32_with_clipping_too(ranks: Any) -> None:
    overrides = ["optimizer.clip=0.5", "batch=50"]
    ((exact, _, _),) = ranks(1, run, overrides)
    (rough, _, _), _ = ranks(2, run, [*overrides, "precision=float16"])
    assert exact.test.loss < 1.5, "it has learned"
    assert rough.test.loss == pytest.approx(exact.test.loss, rel=0.15)


def share_float16() -> None:
    run(["share_weights=true", "precision=float16"])


def test_float16_needs_whole_gradients(ranks: Any) -> None:
    outcomes = ranks.outcomes(2, share_float16)
    assert all(outcome.exit_code != 0 for outcome in outcomes)
    assert "share_weights=true and precision=float16 exclude each other" in outcomes[0].output
