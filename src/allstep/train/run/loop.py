"""A whole run, as each worker runs it.

```
for each batch:   step ── together (one small sum over the ranks) ── log ── evaluate ── save
at the end:       test, once; then a fixed sample of the training split, in the same way
told to stop:     after the step, or within an evaluation: save, and the run that goes on from there does the evaluation first
```

What is due when (an evaluation, a checkpoint, a larger batch) depends on the position alone, so
that a resumed run does the same; only checkpoints by the clock do not, and they change nothing. The
test set is read once, after the last update; nothing is chosen by it.
"""

import math
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from allstep import comm
from allstep.comm.group import agree
from allstep.data import Batch, Loader
from allstep.errors import AllstepError, UserError
from allstep.train.checkpoint.files import Snapshot
from allstep.train.checkpoint.writer_thread import first_not_finite
from allstep.train.config.run_config import RunConfig
from allstep.train.health.divergence import Diverged, Spike, explain
from allstep.train.health.replicas import Fingerprint
from allstep.train.health.stop import EVALUATION, Stopping
from allstep.train.run.checkpoints import Checkpoints
from allstep.train.run.divergence_facts import circumstances
from allstep.train.run.finish import chosen_model, training_score
from allstep.train.run.setup import Job, make_job
from allstep.train.run.start import memory_in_use, opening
from allstep.train.run.state import crossed
from allstep.train.score.evaluate import Interrupted, evaluate
from allstep.train.score.mistakes import Mistakes
from allstep.train.step.after_step import StepOutcome, StepReport
from allstep.train.step.noise import measure_noise
from allstep.train.step.step import PHASES, Clock, step
from allstep.train.watch.callback import Callback, Callbacks
from allstep.train.watch.events import Evaluated, Progress, Result, Score
from allstep.world import World

_COMPARE_EVERY = 500  # updates between two comparisons of the ranks' weights


@dataclass(frozen=True)
class Paused:
    """The run stopped before its end, saved, and wants to be started again."""

    samples: int
    why: str


def train(
    config: RunConfig,
    world: World,
    out: Path,
    callbacks: Sequence[Callback] = (),
    *,
    snapshot: Snapshot | None = None,
    max_seconds: float | None = None,
) -> Result | Paused:
    """Trains as `config` says, on all ranks of `world`. `callbacks` are told how it goes; only rank
    0 needs any.

    snapshot: a checkpoint of the same run, on all ranks, to go on from. max_seconds: stop and save
    before they are over.
    """
    comm.init()
    with Stopping(max_seconds) as stopping:
        job = make_job(config.resolved(world.size), world, out, snapshot)
        told = Callbacks(callbacks)
        told.start(opening(job, with_flop=bool(callbacks)))
        run = _Run(job, told, stopping)
        try:
            result = run.go()
        finally:
            run.checkpoints.close()
    if isinstance(result, Result):
        told.end(result)
    return result


class _Run:
    """A job on its way."""

    def __init__(self, job: Job, callbacks: Callback, stopping: Stopping) -> None:
        self.job, self.callbacks, self.stopping = job, callbacks, stopping
        self.clock, self.since_log = Clock(), job.trainer.task.tally()
        self.checkpoints = Checkpoints(job, callbacks, stopping)
        self.fingerprint = Fingerprint(job.trainer.model, job.world, shared=job.shares_weights)
        self.validation: Score | None = None
        self.first_sample = job.standing.samples
        self.training_seconds = self.seconds_since_evaluation = 0.0
        self.aside = {"saving": 0.0, "telling": 0.0}

    # The way

    def go(self) -> Result | Paused:
        """To the end, or until somebody says stop."""
        started = time.perf_counter()
        try:
            if not (why := self._train()):
                return self._pause()
            return self._result(started, why)
        except Interrupted:
            return self._pause()

    def _train(self) -> str:
        """All steps. Why there are no more; empty when somebody said stop."""
        standing, batches = self.job.standing, self._batches()
        self.clock.restart()
        if standing.owes is not None:
            self._settle(standing.owes)
        while not (why := self._over()):
            before, begun = standing.samples, time.perf_counter()
            stop = self._step(batches)
            if before != self.first_sample:  # the first step makes ready what the others find
                self.stopping.note_cost("step", time.perf_counter() - begun)
            self._after_step(before)
            if stop:
                return ""
        batches.close()
        self.fingerprint.finish()
        self.checkpoints.finish(f"the run is over after {standing.samples} samples ({why})")
        return why

    def _over(self) -> str:
        """Why there is no further step; empty when there is."""
        job, section, best = self.job, self.job.config.evaluation, self.job.standing.best
        metric = job.trainer.task.metrics[0]
        if job.standing.samples >= job.total:
            return "all epochs are done"
        if section.patience is not None and job.standing.worse >= section.patience:
            return (
                f"no better validation {metric.name} in {job.standing.worse} evaluations"
                " (evaluation.patience)"
            )
        if section.stop_at is not None and best and metric.reaches(best, section.stop_at):
            return f"the validation {metric.name} is {metric.of(best):.2%} (evaluation.stop_at)"
        return ""

    def _batches(self) -> Generator[Batch]:
        job = self.job
        job.loaders["train"].batch = job.standing.batch
        yield from job.loaders["train"].batches(job.standing.samples, job.total)

    def _step(self, batches: Iterator[Batch]) -> bool:
        """One update, and what all ranks learn of it; whether to stop."""
        job, standing = self.job, self.job.standing
        batch, error = self._take(batches)
        after = min(standing.samples + standing.batch, self._epoch_end(standing.samples))
        job.trainer.optimizer.measure_norms = job.noise is not None or self._logs_next()
        mine = step(job.trainer, batch, after - standing.samples, self.clock)
        report = StepReport(mine, batch.weight, self.stopping.why is not None, error is not None)
        outcome = job.after_step.exchange(report)
        self.clock.lap("wait")
        if outcome.failed:
            agree.everyone(job.world, lambda: _raise(error))
        self._note(outcome, batch)
        standing.samples = after
        standing.updates += 1
        return outcome.stop

    def _take(self, batches: Iterator[Batch]) -> tuple[Batch, UserError | None]:
        """The next share.

        Where there is something wrong with it, an empty one, so that this step can end and all
        ranks hear of it.
        """
        try:
            batch = next(batches)
            self.job.trainer.task.check_targets(batch, self.job.loaders["train"])
            return batch, None
        except UserError as error:
            return self._empty(), error

    def _empty(self) -> Batch:
        nothing = torch.zeros((0, *self.job.parts.shape), dtype=torch.uint8)
        samples, position = self.job.standing.samples, self.job.standing.samples
        none = torch.zeros(0, dtype=torch.int64)
        return Batch(nothing, none, none.numpy(), 0, samples // self.job.num_train, position, {})

    def _epoch_end(self, position: int) -> int:
        return (position // self.job.num_train + 1) * self.job.num_train

    def _note(self, outcome: StepOutcome, batch: Batch) -> None:
        """Add the step of all ranks to what is known of the run."""
        job, total = self.job, outcome.tally
        self.since_log, job.standing.since = self.since_log + total, job.standing.since + total
        norms = job.trainer.optimizer.norms
        self._judge(job.watch.see(total.score().loss, int(total.count)), batch)
        if job.noise is not None and norms is not None:
            measure_noise(job.noise, job.trainer, norms, outcome.samples)
        if job.ema is not None:
            job.ema.update()

    def _judge(self, verdict: Spike | Diverged | None, batch: Batch) -> None:
        """A spike is told; a loss that has diverged ends the run on all ranks, before it is saved."""
        if isinstance(verdict, Spike):
            self.callbacks.event(
                str(verdict), step=verdict.step, peak=verdict.peak, best=verdict.best
            )
        if isinstance(verdict, Diverged):
            self.checkpoints.close()
            known = circumstances(self.job, batch)
            self.callbacks.event(
                str(verdict), step=verdict.step, samples=known.samples, lr=known.lr
            )
            error = AllstepError("the run diverged: " + explain(verdict, known, self.job.config))
            raise error if self.job.world.rank == 0 else SystemExit(error.exit_code)

    # What is due

    def _after_step(self, before: int) -> None:
        job, standing = self.job, self.job.standing
        if standing.updates % _COMPARE_EVERY == 0:
            self.fingerprint.start(standing.updates)
        elif standing.updates % _COMPARE_EVERY == 1:
            self.fingerprint.finish()
        if self._evaluates(before) or standing.updates % job.config.log_every == 0:
            self._log()
        self._settle(before)
        with self._aside("telling"):
            self.checkpoints.tell()
        self.clock.lap("update")

    def _evaluates(self, before: int) -> bool:
        job, samples = self.job, self.job.standing.samples
        return samples == job.total or crossed(
            before, samples, job.config.evaluation.every * job.num_train
        )

    def _settle(self, before: int) -> None:
        """What the last step, which began at `before`, made due.

        An evaluation may be interrupted: then the run owes all of it.
        """
        job, standing = self.job, self.job.standing
        standing.owes = before
        is_best = self._evaluates(before) and self._evaluate()
        standing.owes = None
        self._grow()
        per_epoch = job.config.save.epochs
        ends = standing.samples == job.total
        if (
            is_best
            or ends
            or crossed(before, standing.samples, per_epoch and per_epoch * job.num_train)
        ):
            self._save(is_best)
        elif self.checkpoints.are_due():
            self._save()

    def _logs_next(self) -> bool:
        return (self.job.standing.updates + 1) % self.job.config.log_every == 0

    def _log(self) -> None:
        """Tells the callbacks what all ranks did since the last time."""
        self.clock.lap("update")
        job, seconds = self.job, sum(self.clock.seconds.values())
        mine = torch.tensor([*self.clock.seconds.values(), memory_in_use()], dtype=torch.float64)
        by_rank = [torch.empty_like(mine) for _ in range(job.world.size)]
        dist.all_gather(by_rank, mine)
        *times, memory = torch.stack(by_rank).T.tolist()
        self.clock.restart()
        score, norms = self.since_log.score(), job.trainer.optimizer.norms
        progress = Progress(
            epoch=(job.standing.samples - 1) // job.num_train,
            samples=job.standing.samples,
            loss=score.loss,
            accuracy=score.accuracy,
            lr=job.trainer.optimizer.param_groups[0]["lr"],
            seconds=seconds,
            images_per_second=score.count / max(seconds, 1e-9),
            times=dict(zip(PHASES, times, strict=True)),
            memory=[int(each) for each in memory],
            batch=job.standing.batch,
            grad_norm=None if norms is None else _finite(norms.mean**0.5 / job.trainer.scale),
            noise_scale=_finite(job.noise.scale) if job.noise is not None else None,
            trust=self._trust_ratios(),
        )
        with self._aside("telling"):
            self.callbacks.progress(progress)
        self.training_seconds += seconds
        self.seconds_since_evaluation += seconds
        self.since_log = job.trainer.task.tally()

    def _trust_ratios(self) -> dict[str, float] | None:
        """Of each layer, where the optimizer has them."""
        ratios = getattr(self.job.trainer.optimizer, "trust_ratios", None)
        return None if ratios is None else dict(ratios())

    def _evaluate(self) -> bool:
        """On the validation part; whether this is the best so far."""
        job, standing = self.job, self.job.standing
        trained = standing.since.score()
        self.clock.lap("update")
        started = time.perf_counter()
        if broken := first_not_finite(job.trainer.model):
            self._judge(job.watch.broken(broken, trained.loss), self._empty())
        self.validation = self._validate()
        self.clock.skip()
        self.stopping.note_cost(EVALUATION, time.perf_counter() - started)
        is_best = standing.note(self.validation, job.trainer.task.metrics[0])
        epoch = -(-standing.samples // job.num_train)
        seconds, self.seconds_since_evaluation = self.seconds_since_evaluation, 0.0
        evaluated = Evaluated(
            epoch, standing.samples, trained, self.validation, seconds, is_best, self._num_bad()
        )
        self.callbacks.evaluated(evaluated)
        return is_best

    def _validate(self) -> Score:
        return self._score(self.job.evaluated_model, self.job.loaders["validation"])

    def _score(self, model: nn.Module, loader: Loader, mistakes: Mistakes | None = None) -> Score:
        return evaluate(
            model,
            loader,
            self.job.trainer.to_input,
            self.job.trainer.task,
            mirror=self.job.config.evaluation.flip,
            mistakes=mistakes,
            must_leave=self.stopping.must_leave,
        )

    def _grow(self) -> None:
        """A larger batch from here on, if it is time for one."""
        job = self.job
        batch = job.growth.batch(job.standing.samples, job.noise)
        if batch != job.standing.batch:
            pieces = job.growth.pieces(batch, job.world.size, job.config.accumulation)
            said = f"the batch grows from {job.standing.batch} to {batch}" + (
                f", in {pieces} pieces" if pieces > 1 else ""
            )
            self.callbacks.event(said, samples=job.standing.samples, batch=batch, pieces=pieces)
            job.standing.batch = job.loaders["train"].batch = batch
            job.set_pieces(pieces)

    def _num_bad(self) -> int:
        """Samples that were skipped so far, by all ranks; one that two ranks met, in different
        epochs, counts twice."""
        mine = sum(loader.num_bad for loader in self.job.loaders.values())
        return sum(agree.gather(self.job.world, mine))

    def _save(self, best: bool = False) -> None:
        with self._aside("saving"):
            self.checkpoints.save(best)

    @contextmanager
    def _aside(self, what: str) -> Iterator[None]:
        """Time that is not the step's."""
        started = time.perf_counter()
        yield
        self.aside[what] += time.perf_counter() - started

    def _pause(self) -> Paused:
        standing = self.job.standing
        self.fingerprint.finish()
        self.checkpoints.finish(f"stopped after {standing.samples} of {self.job.total} samples")
        why = agree.gather(self.job.world, self.stopping.why)
        reason = next((each for each in why if each is not None), "a worker was told to stop")
        self.callbacks.event(
            f"stopped and saved after {standing.samples} of {self.job.total} samples: {reason}",
            samples=standing.samples,
        )
        return Paused(standing.samples, reason)

    # The end

    def _result(self, started: float, why: str) -> Result:
        job, standing = self.job, self.job.standing
        if self.validation is None:  # resumed after the last step
            self.validation = self._validate()
        model, chosen = chosen_model(job, self.callbacks)
        mistakes = Mistakes(job.parts.classes)
        test = self._score(model, job.loaders["test"], mistakes)
        if problem := mistakes.write(job.out, job.world):
            self.callbacks.event(problem)
        if job.noise is not None and job.noise.steps:
            self.callbacks.event(
                job.noise.advice(standing.batch), noise_scale=_finite(job.noise.scale)
            )
        trained = standing.samples - self.first_sample
        speed = trained / self.training_seconds if trained else 0.0
        seconds = time.perf_counter() - started
        return Result(
            test=test,
            validation=self.validation,
            images_per_second=speed,
            seconds_per_epoch=job.num_train / speed if speed else 0.0,
            seconds=seconds,
            out=job.out,
            samples=standing.samples,
            best=standing.best,
            chosen=chosen,
            why=why if standing.samples < job.total else "",
            aside=self.aside,
            num_bad=self._num_bad(),
            train=training_score(
                job, chosen, lambda loader: self._score(model, loader), self.callbacks
            ),
        )


def _finite(value: float) -> float | None:
    """JSON has no infinity."""
    return value if math.isfinite(value) else None


def _raise(error: UserError | None) -> None:
    if error is not None:
        raise error
