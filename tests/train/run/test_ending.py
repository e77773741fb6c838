"""The training sample at the end of a run: its score with any number of workers, no effect."""

import itertools
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import allstep
import allstep.train.run.finish as ending
import allstep.train.run.loop as run_module
from allstep import runlog
from allstep.data import Loader
from allstep.errors import DataError
from allstep.train import read_config
from allstep.train.checkpoint import write_and_read as checkpoint
from allstep.train.input.splits import open_splits
from allstep.train.run.progress import RunProgress
from allstep.train.use.predict import load_run
from allstep.train.watch.events import Figures, Result, Score
from allstep.train.watch.record_callback import Record
from support.image_folders import make_folder
from support.ranks import Ranks
from support.scores import classified

# All that makes training differ from evaluation: running statistics, dropout, averaged weights,
# augmentation, label smoothing.
OVERRIDES = [
    *(
        "epochs=2",
        "batch=50",
        "data.validation=100",
        "log_every=7",
        "save.seconds=null",
        "data.split_seed=3",
    ),
    *(
        "model=lenet",
        "model.norm=batch",
        "model.options.hidden=32",
        "model.options.dropout=0.5",
        "ema.decay=0.9",
    ),
    *("data.augment=PadAndCrop(8, pad=2)", "label_smoothing=0.1", "evaluation.flip=true"),
]
NUM_TRAIN = 1437 - 100


def run(overrides: list[str], out: Path | None = None) -> Result | run_module.Paused:
    """Train a run, or resume the one in `out`."""
    world, out = allstep.init(), out or Path.cwd() / "out"
    callbacks = [Record(runlog.RunLog(out / "run.jsonl"))] if world.rank == 0 else []
    config = read_config("digits", [*OVERRIDES, *overrides])
    if world.rank == 0:
        (out / "config.yaml").write_text(config.to_yaml())
    snapshot = checkpoint.newest(out / "checkpoints").snapshot
    return run_module.train(config, world, out, callbacks, snapshot=snapshot)


def run_whose_first_evaluation_is_best(overrides: list[str]) -> Result | run_module.Paused:
    original = RunProgress.note

    def note(progress: RunProgress, validation: Score, figures: Figures) -> bool:
        worst = classified(validation.loss, -1.0, validation.count)
        return original(progress, validation if progress.best is None else worst, figures)

    RunProgress.note = note  # type: ignore[method-assign]
    return run(overrides)


def by_hand(out: Path, which: Any) -> tuple[float, float]:
    """Return loss and accuracy of a checkpoint on the sample, computed with torch alone."""
    trained = load_run(out, which)
    split = open_splits(read_config("digits", OVERRIDES)).train.sample(100, seed=3)
    images, labels = (
        torch.from_numpy(getattr(split.source, name)[split.numbers]) for name in ("data", "target")
    )
    inputs: Tensor = trained.to_input(images)
    with torch.no_grad():
        logits = (trained.model(inputs) + trained.model(inputs.flip(-1))) / 2
    return float(functional.cross_entropy(logits, labels)), float(
        (logits.argmax(1) == labels).float().mean()
    )


@pytest.mark.parametrize("choose", ["last", "best"])
def test_the_sample_is_scored_once_in_evaluation_mode_with_the_tested_weights(
    ranks: Ranks, choose: Any
) -> None:
    """Reference: the checkpoint of these weights. The best ones are set to those of epoch 1."""
    results = ranks(2, run_whose_first_evaluation_is_best, [f"evaluation.weights={choose}"])
    out, samples = results[0].out, NUM_TRAIN * (2 if choose == "last" else 1)
    loss, accuracy = by_hand(out, choose)
    for result in results:
        assert result.chosen == choose
        assert result.train is not None and result.train.samples == samples
        assert result.train.score.count == 100
        assert result.train.score.loss == pytest.approx(loss, rel=1e-4)
        assert result.train.score.accuracy == pytest.approx(accuracy)
    evals = runlog.read(out / "run.jsonl").evals
    assert [line["part"] for line in evals] == ["validation", "validation", "train", "test"]
    assert (evals[2]["samples"], evals[2]["count"], evals[2]["seconds"] > 0) == (samples, 100, True)


def test_it_is_the_same_with_any_number_of_workers_and_any_seed(ranks: Ranks) -> None:
    """One worker scores what two do, up to rounding; another seed scores the same samples."""
    plain = ["model.options.dropout=0", "model.norm=none"]
    ((alone,), (both, _)) = ranks(1, scored_samples, plain), ranks(2, scored_samples, plain)
    assert alone[1].loss == pytest.approx(both[1].loss, rel=0.01)
    assert sorted(alone[0]) == sorted(both[0])
    ((other,),) = (ranks(1, scored_samples, [*plain, "seed=1"]),)
    assert other[0] == alone[0] and other[1].loss != alone[1].loss


def scored_samples(overrides: list[str]) -> tuple[list[int], Score]:
    """Return the sample numbers of the training sample, and its score."""
    numbers: list[int] = []
    original = ending.make_sample_loader

    def spy(*args: Any) -> Loader | None:
        loader = original(*args)
        assert loader is not None and loader.numbers is not None
        numbers.extend(loader.numbers.tolist())
        return loader

    ending.make_sample_loader = spy
    result = run(overrides)
    assert isinstance(result, Result) and result.train is not None
    return numbers, result.train.score


def state_around_the_sample() -> list[tuple[dict[str, Tensor], Tensor, dict[str, bytes]]]:
    """Return weights with running statistics, random state and checkpoint files, before and after
    the sample is scored."""
    seen: list[Any] = []
    original = run_module.training_score

    def spy(job: Any, *args: Any) -> Any:
        def look() -> None:
            files = {
                path.name: path.read_bytes()
                for path in checkpoint.written(job.out / "checkpoints")[0].iterdir()
            }
            tensors = {
                **job.trainer.model.state_dict(),
                **{f"a.{k}": v for k, v in job.ema.model.state_dict().items()},
            }
            seen.append(
                (
                    {name: each.clone() for name, each in tensors.items()},
                    torch.get_rng_state(),
                    files,
                )
            )

        look()
        found = original(job, *args)
        assert found is not None
        look()
        return found

    run_module.training_score = spy
    run([])
    return seen


def test_it_changes_nothing(ranks: Ranks) -> None:
    (((weights, random, files), (weights_after, random_after, files_after)),) = ranks(
        1, state_around_the_sample
    )
    assert (
        any("running_mean" in name for name in weights) and weights.keys() == weights_after.keys()
    )
    assert all(torch.equal(each, weights_after[name]) for name, each in weights.items())
    assert torch.equal(random, random_after)
    assert files == files_after and "weights.safetensors" in files


def stopped_within_the_sample(out: Path, evaluation: int) -> tuple[str, bool]:
    """Send the last rank SIGTERM within that evaluation. Return how the run ended, and whether it
    has a training score."""
    begun, original, world = itertools.count(1), run_module.evaluate, allstep.init()

    def with_signal(*args: Any, **options: Any) -> Score:
        if next(begun) == evaluation and world.rank == world.size - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(*args, **options)

    run_module.evaluate = with_signal
    result = run([], out)
    if isinstance(result, run_module.Paused):
        return "paused", False
    return "ended", result.train is not None


def test_a_signal_within_the_sample_costs_the_sample_alone(ranks: Ranks, tmp_path: Path) -> None:
    """The evaluations are two validations, the test and the sample."""
    assert ranks(2, stopped_within_the_sample, tmp_path, 4) == [("ended", False)] * 2


def test_a_run_that_is_asked_to_stop_has_none_and_has_it_when_it_is_resumed(
    ranks: Ranks, tmp_path: Path
) -> None:
    assert ranks(2, stopped_within_the_sample, tmp_path, 1) == [("paused", False)] * 2
    log = tmp_path / "run.jsonl"
    assert runlog.read(log).evals == ()
    assert ranks(2, stopped_within_the_sample, tmp_path, 0) == [("ended", True)] * 2
    assert [line["part"] for line in runlog.read(log).evals] == [
        "validation",
        "validation",
        "train",
        "test",
    ]


def sample_that_cannot_be_read() -> Result | run_module.Paused:
    world = allstep.init()

    def fail(*args: Any) -> Loader:
        raise DataError("the disk is gone") if world.rank else DataError("not here")

    original = ending.make_sample_loader
    ending.make_sample_loader = fail if world.rank else original
    return run([])


def test_a_sample_that_cannot_be_read_is_an_event_on_all_ranks(ranks: Ranks) -> None:
    first, second = ranks(2, sample_that_cannot_be_read)
    assert first.train is None and second.train is None
    assert first.test.count == second.test.count == 360
    record = runlog.read(first.out / "run.jsonl")
    assert record.end is not None and record.end["train"] is None
    assert [line["text"] for line in record.events] == [
        "no training score in evaluation mode: the disk is gone"
    ]


def test_early_stopping_has_one(ranks: Ranks) -> None:
    (result,) = ranks(1, run, ["evaluation.stop_at=0.01"])
    assert result.why.startswith("the validation accuracy is")
    assert result.train is not None and result.train.samples == NUM_TRAIN


def resume_with(out: Path, overrides: list[str]) -> str:
    try:
        run(overrides, out)
    except allstep.UserError as error:
        return str(error)
    return ""


def test_data_with_other_classes_does_not_continue_a_run(ranks: Ranks, tmp_path: Path) -> None:
    """A class folder that is renamed between two sessions changes the number of every label."""
    folder, out = make_folder(tmp_path / "photos", 20), tmp_path / "out"
    overrides = [
        f"data.train={folder}",
        "data.augment=CentreCrop(16)",
        "data.prepare=CentreCrop(16)",
        "batch=16",
    ]
    overrides += ["data.validation=10"]
    out.mkdir()
    ranks(1, run, [*overrides, "epochs=1"], out)
    (folder / "cat").rename(folder / "zebra")
    (complaint,) = ranks(1, resume_with, out, [*overrides, "epochs=2"])
    assert "only there: zebra; only in the run: cat" in complaint
    (folder / "zebra").rename(folder / "cat")
    assert ranks(1, resume_with, out, [*overrides, "epochs=2"]) == [""]


def test_the_best_checkpoint_is_looked_at_like_the_newest(ranks: Ranks, tmp_path: Path) -> None:
    """A checkpoint in the place of the best one is complete, but not the best."""
    ((result,),) = (ranks(1, run_whose_first_evaluation_is_best, ["evaluation.weights=best"]),)
    out = shutil.copytree(result.out, tmp_path / "out")
    first, last = sorted(path for path in (out / "checkpoints").iterdir() if path.name.isdigit())
    shutil.rmtree(first)
    shutil.copytree(last, first)
    snapshot, problem = ending._read_or_not(
        first, checkpoint.read(last).state["pictures"]["classes"]
    )
    assert snapshot is None and "as in the folder's name" in problem
    snapshot, problem = ending._read_or_not(last, ["other"] * 10)
    assert snapshot is None and "not the same ones" in problem
    assert (
        ending._read_or_not(last, checkpoint.read(last).state["pictures"]["classes"])[0] is not None
    )
