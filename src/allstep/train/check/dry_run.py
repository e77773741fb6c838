"""`allstep train --dry-run`: one of everything, with all workers, before a long run is started.

```
stage      what is done                                      errors that it finds
start      open data, make model and optimizer, broadcast    model does not fit images, memory
data       all workers read first and last batch per split   damaged files, labels out of range
step       one update, then a few timed ones                 too little memory, no gradients
evaluate   one batch of the validation split                 images of another size
save       write a checkpoint where the run would            no permission, no space
load       read it, make a run of it, compare checkpoints    state that is lost, bit for bit
```

Everything is written into a folder that is removed. At the end there is a forecast of the cost of a
whole run, from the measured times. An error names its stage; the exit status is 2 for errors that
the user can correct, 1 for others.
"""

import gc
import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import torch

from allstep.comm.group import agree
from allstep.console.quantities import about, milliseconds, nbytes
from allstep.data import Batch, Loader
from allstep.errors import CheckpointError, UserError
from allstep.train.check.overfit import num_samples
from allstep.train.checkpoint import write_and_read as checkpoint
from allstep.train.checkpoint.write_and_read import Snapshot, Tensors
from allstep.train.config.check_sync import synchronous
from allstep.train.config.run_config import ResolvedConfig
from allstep.train.input.splits import make_loaders
from allstep.train.run.capture import capture
from allstep.train.run.opening_event import memory_in_use
from allstep.train.run.placed_job import Job
from allstep.train.run.setup import make_job
from allstep.train.score.evaluate import evaluate
from allstep.train.step.after_step import StepReport
from allstep.train.step.step import Clock, step
from allstep.world import World

_MAX_TIMED, _MAX_SECONDS = 5, 10.0
"""Number of timed steps; fewer if they take longer than these seconds."""


@dataclass(frozen=True)
class RehearsedStage:
    """One line of the table; time and memory are those of the worst rank."""

    name: str
    what: str
    """What was done, for the table."""
    seconds: float
    memory: int
    """Bytes of memory in use after the stage."""


@dataclass(frozen=True)
class Rehearsed:
    """Measurements of a dry run."""

    stages: tuple[RehearsedStage, ...]
    epochs: int
    steps_per_epoch: int
    step_seconds: float
    """Seconds of one step, without the first one."""
    evaluations: int
    """Number of evaluations of a whole run, with test and training sample."""
    evaluation_seconds: float
    """Seconds of a whole evaluation, extrapolated from one batch."""
    checkpoint_nbytes: int
    checkpoints: int
    """Number of checkpoints on the disk at the same time.

    These are the ones to keep, the best, and one that is being written.
    """
    free_nbytes: int
    """Free bytes on the disk."""

    @property
    def seconds(self) -> float:
        """Return the forecast of the seconds of a whole run."""
        return (
            self.epochs * self.steps_per_epoch * self.step_seconds
            + self.evaluations * self.evaluation_seconds
        )

    @property
    def fits(self) -> bool:
        """Return whether the disk has room for the checkpoints."""
        return self.checkpoint_nbytes * self.checkpoints <= self.free_nbytes


def rehearse(config: ResolvedConfig, world: World, out: Path) -> Rehearsed:
    """Rehearse a run on all ranks, and return the measurements.

    `out` is a folder for this alone.
    """
    play = _Rehearsal(config, world, out)
    play.start()
    play.read_data()
    step_seconds = play.take_steps()
    evaluation_seconds = play.evaluate_a_batch()
    path = play.save()
    play.load(path)
    batches = len(play.job.loaders["train"])
    return Rehearsed(
        stages=tuple(play.stages),
        epochs=config.num_epochs,
        steps_per_epoch=batches,
        step_seconds=step_seconds,
        # The test and the training sample are evaluated besides the validations.
        evaluations=max(1, int(config.num_epochs / config.evaluation.every)) + 2,
        evaluation_seconds=evaluation_seconds,
        checkpoint_nbytes=play.nbytes,
        checkpoints=config.save.keep + 2,
        free_nbytes=agree.rank_0_decides(world, lambda: shutil.disk_usage(out).free),
    )


class _Rehearsal:
    """The stages of a dry run, to be called in their order."""

    job: Job

    def __init__(self, config: ResolvedConfig, world: World, out: Path) -> None:
        self.config, self.world, self.out = synchronous(config), world, out
        self.stages: list[RehearsedStage] = []
        self.nbytes = 0

    @contextmanager
    def _stage(self, name: str) -> Iterator[list[str]]:
        """Measure a stage, and name it in any error.

        The caller appends what was done to the list.
        """
        what: list[str] = []
        started = time.perf_counter()
        try:
            yield what
        except UserError as error:
            raise type(error)(f"dry run, stage '{name}': {error}") from error
        except Exception as error:
            error.add_note(f"allstep: dry run: the stage '{name}' failed on rank {self.world.rank}")
            raise
        mine = (time.perf_counter() - started, memory_in_use())
        seconds, memory = zip(*agree.gather(self.world, mine), strict=True)
        self.stages.append(RehearsedStage(name, ", ".join(what), max(seconds), max(memory)))

    def start(self) -> None:
        """Open the data, and make the model and its optimizer."""
        with self._stage("start") as what:
            self.job = make_job(self.config, self.world, self.out)
            samples = " + ".join(f"{loader.num_samples:,}" for loader in self.job.loaders.values())
            parameters = sum(each.numel() for each in self.job.trainer.model.parameters())
            what += [f"{samples} samples", f"{parameters:,} parameters"]
            what += [f"execution {self.job.execution}", self.job.trainer.precision.name]

    def read_data(self) -> None:
        """Read the first and the last batch of each split."""
        with self._stage("data") as what:
            for name, loader in self.job.loaders.items():
                places = sorted({0, (loader.num_samples - 1) // loader.batch * loader.batch})
                for place in places:
                    # B023 does not apply, because the function is called at once.
                    agree.everyone(self.world, lambda: self._read(loader, place))  # noqa: B023
                what.append(f"{name}: {len(places)} of {len(loader)} batches")

    def _read(self, loader: Loader, place: int) -> None:
        """Read the batch at a position and check its targets."""
        batch = next(iter(loader.batches(place)))
        self.job.trainer.task.check_targets(batch, loader)

    def take_steps(self) -> float:
        """Take one step and some timed ones; return the median seconds of the timed ones."""
        job = self.job
        with self._stage("step") as what:
            batches = job.loaders["train"].batches(0, job.total)
            times: list[float] = []
            for batch in batches:
                started = time.perf_counter()
                self._step(batch)
                times.append(time.perf_counter() - started)
                if agree.rank_0_decides(
                    self.world, lambda: len(times) > _MAX_TIMED or sum(times) > _MAX_SECONDS
                ):
                    break
            first, usual = agree.rank_0_decides(
                self.world, lambda: (times[0], median(times[1:] or times))
            )
            what += [f"batch {job.config.batch}", f"first {first:.3g} s, then {usual * 1e3:.3g} ms"]
        return usual

    def _step(self, batch: Batch) -> None:
        """Take one step."""
        job, progress = self.job, self.job.progress
        count = num_samples(job, batch)
        mine = step(job.trainer, batch, count, Clock())
        job.after_step.exchange(StepReport(mine, batch.weight))
        if job.ema is not None:
            job.ema.update()
        progress.samples, progress.updates = progress.samples + count, progress.updates + 1

    def evaluate_a_batch(self) -> float:
        """Evaluate one batch of the validation split; return the seconds for all of it."""
        job, loader = self.job, self.job.loaders["validation"]
        with self._stage("evaluate") as what:
            splits = replace(
                job.splits,
                validation=job.splits.validation.first(min(loader.batch, loader.num_samples)),
            )
            device = next(job.trainer.model.parameters()).device
            few = make_loaders(job.config, splits, self.world, self.out, device)["validation"]
            started = time.perf_counter()
            score = evaluate(
                job.evaluated_model,
                few,
                job.trainer.to_input,
                job.trainer.task,
                flip=job.config.evaluation.flip,
            )
            what += [f"{score.count} of {loader.num_samples:,} samples", f"loss {score.loss:.4g}"]
        return (time.perf_counter() - started) * len(loader)

    def save(self) -> Path:
        """Write a checkpoint on rank 0, and return its path."""
        with self._stage("save") as what:
            path = agree.rank_0_decides(
                self.world, lambda: _write(self.out / "checkpoints", capture(self.job))
            )
            self.nbytes = agree.rank_0_decides(
                self.world, lambda: sum(each.stat().st_size for each in path.iterdir())
            )
            what.append(nbytes(self.nbytes))
        return path

    def load(self, path: Path) -> None:
        """Read the checkpoint, resume a run from it, and check that it would write the same one."""
        with self._stage("load") as what:
            snapshot = agree.rank_0_decides(self.world, lambda: checkpoint.read(path))
            agree.everyone(self.world, lambda: _check_same("the file", capture(self.job), snapshot))
            for loader in self.job.loaders.values():
                loader.close()
            del self.job
            gc.collect()
            self.job = make_job(self.config, self.world, self.out, snapshot)
            agree.everyone(
                self.world,
                lambda: _check_same("a run that resumes from it", snapshot, capture(self.job)),
            )
            what.append(f"{len(snapshot.weights) + len(snapshot.optimizer)} tensors, the same bits")


def _write(folder: Path, snapshot: Snapshot) -> Path:
    """Write a checkpoint; raise CheckpointError if that fails."""
    try:
        return checkpoint.write(folder, snapshot)
    except OSError as error:
        raise CheckpointError(
            f"{error.filename or folder}: cannot be written: {error.strerror or error}"
        ) from error


def _check_same(where: str, before: Snapshot, after: Snapshot) -> None:
    """Raise CheckpointError with the first difference of two snapshots."""
    for kind, ours, theirs in (
        ("weight", before.weights, after.weights),
        ("optimizer's", before.optimizer, after.optimizer),
    ):
        if (name := _first_unlike(ours, theirs)) is not None:
            raise CheckpointError(
                f"the checkpoint does not match the run: the {kind} {name} differs in {where}"
            )
    plain = [json.loads(json.dumps(each.state)) for each in (before, after)]
    for key in dict.fromkeys([*plain[0], *plain[1]]):
        if plain[0].get(key) != plain[1].get(key):
            raise CheckpointError(
                f"the checkpoint does not match the run: {key!r} of its state differs in {where}"
            )


def _first_unlike(ours: Tensors, theirs: Tensors) -> str | None:
    """Return the name of the first tensor that differs, or None."""
    for name in dict.fromkeys([*ours, *theirs]):
        if name not in ours or name not in theirs or not _same_bits(ours[name], theirs[name]):
            return name
    return None


def _same_bits(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Return whether two tensors have the same bits, so NaN equals NaN."""
    if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
        return False
    first, second = (
        each.detach().cpu().contiguous().flatten().view(torch.uint8) for each in (ours, theirs)
    )
    return torch.equal(first, second)


# Texts


def table(rehearsed: Rehearsed) -> Iterator[list[str]]:
    """Yield the rows of the table, the header first, then one per stage."""
    yield ["stage", "seconds", "memory", ""]
    for each in rehearsed.stages:
        yield [each.name, f"{each.seconds:.2f}", nbytes(each.memory), each.what]


def forecast(rehearsed: Rehearsed) -> list[str]:
    """Return lines about the time and the disk space of a whole run."""
    steps = rehearsed.epochs * rehearsed.steps_per_epoch
    time_line = (
        f"a whole run: {rehearsed.epochs} epochs x {rehearsed.steps_per_epoch:,} steps x"
        f" {milliseconds(rehearsed.step_seconds)} = {about(steps * rehearsed.step_seconds)}, and"
        f" {rehearsed.evaluations} evaluations of {about(rehearsed.evaluation_seconds)}:"
        f" {about(rehearsed.seconds)} in total"
    )
    many, each = rehearsed.checkpoints, rehearsed.checkpoint_nbytes
    room = f"{nbytes(rehearsed.free_nbytes)} are free"
    if not rehearsed.fits:
        room += ", which is too little: set save.keep lower, or choose another disk with --out"
    disk_line = f"disk: up to {many} checkpoints of {nbytes(each)} = {nbytes(many * each)}; {room}"
    return [time_line, disk_line]
