"""The training loop, as it runs on each worker.

```
for each round:   train until all ranks agree ── log ── evaluate ── save
at the end:       test, once; then evaluate a fixed sample of the training split
stop request:     save after the round, or within an evaluation, which the resumed run then repeats
                  first
```

In synchronous training a round is one step; `sync` of the config determines it (`rounds`).

When an evaluation, a checkpoint or a larger batch is due depends only on the position, so that a
resumed run does the same. The exception is checkpoints by time, which do not affect the result. The
test split is read once, after the last update; no choice depends on it.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from torch import nn

from allstep import comm
from allstep.comm.group import agree
from allstep.data import Batch, Loader
from allstep.errors import AllstepError, PeerLost
from allstep.train.checkpoint.saver import first_not_finite
from allstep.train.checkpoint.write_and_read import Snapshot
from allstep.train.config.run_config import RunConfig
from allstep.train.health.compare_weights import Fingerprint
from allstep.train.health.divergence import Diverged, Spike, explain
from allstep.train.health.stop_request import EVALUATION, Stopping
from allstep.train.run.adapt_shares import adapt_shares
from allstep.train.run.checkpoints import Checkpoints
from allstep.train.run.divergence_facts import circumstances
from allstep.train.run.finish import chosen_model, training_score
from allstep.train.run.opening_event import opening
from allstep.train.run.placed_job import Job
from allstep.train.run.progress import Paused, crossed
from allstep.train.run.progress_event import OwnWork, Reported, finite, progress_event
from allstep.train.run.rounds.choose import make_round
from allstep.train.run.rounds.due import evaluates, saves
from allstep.train.run.rounds.round import Surroundings
from allstep.train.run.setup import make_job
from allstep.train.score.evaluate import Interrupted, evaluate
from allstep.train.score.mistakes import Mistakes
from allstep.train.step.after_step import StepOutcome
from allstep.train.step.noise import measure_noise
from allstep.train.step.step import Clock
from allstep.train.watch.callback import Callback
from allstep.train.watch.events import Evaluated, Result, Score
from allstep.train.watch.straggler_report import with_straggler_report
from allstep.world import World

# Updates between two comparisons of the ranks' weights.
_COMPARE_EVERY = 500


def train(
    config: RunConfig,
    world: World,
    out: Path,
    callbacks: Sequence[Callback] = (),
    *,
    snapshot: Snapshot | None = None,
    max_seconds: float | None = None,
) -> Result | Paused:
    """Train the run of `config` on all ranks of `world`. A collective.

    Return the result, or `Paused` if the run was asked to stop before its end.

    - `world`: rank and size of this process, from `allstep.init()`.
    - `out`: the run folder, for checkpoints and lists of bad samples.
    - `callbacks`: receive the events of the run; only rank 0 needs any.
    - `snapshot`: a checkpoint of the same run from which to resume, the same on all ranks; None
      starts a new run.
    - `max_seconds`: save and stop before this many seconds have passed; None: no limit.
    """
    comm.init()
    with Stopping(max_seconds) as stopping:
        job = make_job(config.resolved(world.size), world, out, snapshot)
        callback = with_straggler_report(callbacks)
        callback.start(opening(job, with_flop=bool(callbacks)))
        run = Run(job, callback, stopping)
        try:
            result = run.go()
        finally:
            run.checkpoints.close()
    if isinstance(result, Result):
        callback.end(result)
    return result


class Run:
    """The execution of a job: its steps, evaluations and checkpoints."""

    def __init__(self, job: Job, callbacks: Callback, stopping: Stopping) -> None:
        self.job, self.callbacks, self.stopping = job, callbacks, stopping
        self.checkpoints = Checkpoints(job, callbacks, stopping)
        self.started, self.first_sample = time.perf_counter(), job.progress.samples
        self.training_seconds = self.seconds_since_evaluation = 0.0
        self.aside = {"saving": 0.0, "telling": 0.0}
        self._start_world()

    def _start_world(self) -> None:
        """Set what belongs to one world; an elastic run calls it again in each further one."""
        job = self.job
        self.clock, self.since_log, self.reported = Clock(), job.trainer.task.tally(), Reported()
        self.own = OwnWork(job.trainer.optimizer.traffic)
        self.fingerprint = Fingerprint(job.trainer.model, job.world, shared=job.shares_weights)
        # A rank that joins has none, and all ranks must evaluate together.
        self.validation: Score | None = None
        self.has_stepped = False
        self.round = make_round(self._surroundings())

    def _surroundings(self) -> Surroundings:
        return Surroundings(
            self.job,
            self.clock,
            self.stopping,
            self.callbacks,
            self.reported,
            must_leave_world=lambda: self._must_leave_world(),
            is_save_due=lambda: self.checkpoints.are_due(),
            has_pushed=lambda count: self._note_push(count),
        )

    # Training

    def go(self) -> Result | Paused:
        """Run to the end, or until a rank is asked to stop."""
        try:
            if not (why := self._train()):
                return self._pause()
            return self._result(why)
        except Interrupted:
            return self._pause()

    def _train(self) -> str:
        """Run all rounds. Return the reason for ending, or "" if asked to stop."""
        progress = self.job.progress
        self.clock.restart()
        if progress.owes is not None:
            self._settle(progress.owes)
        while not (why := self.job.why_over()):
            before, updates = progress.samples, progress.updates
            agreed = self.round.go()
            self._note(agreed.outcome, agreed.last, agreed.updates)
            self.own.samples += agreed.samples
            progress.owes, progress.samples = before, agreed.position
            progress.updates += agreed.updates
            if agreed.lost:
                self._note_world(before)
                raise PeerLost(agreed.lost, rank=self.job.world.rank)
            adapt_shares(self.job, agreed.outcome, self.callbacks)
            self._after_round(before, updates)
            if agreed.outcome.stop:
                return ""
            if agreed.outcome.change and not self.job.why_over():
                self._leave_world()
        self.round.close()
        self.fingerprint.finish()
        self.checkpoints.finish(f"the run is over after {progress.samples} samples ({why})")
        return why

    def _note(self, outcome: StepOutcome, batch: Batch, updates: int) -> None:
        """Add the round of all ranks to the sums, the loss watch, the noise scale and the EMA."""
        job, total = self.job, outcome.tally
        self.since_log, job.progress.since = self.since_log + total, job.progress.since + total
        norms = job.trainer.optimizer.norms
        self._judge(job.watch.see(total.score().loss, int(total.count)), batch)
        if job.noise is not None and norms is not None:
            measure_noise(job.noise, job.trainer, norms, outcome.samples)
        if job.ema is not None:
            job.ema.update(updates)

    def _judge(self, verdict: Spike | Diverged | None, batch: Batch) -> None:
        """Report a spike of the loss; end the run on all ranks, unsaved, if it has diverged."""
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

    # What is due after a round

    def _after_round(self, before: int, updates: int) -> None:
        """Do what is due after a round, which began at `before` samples and `updates` updates."""
        job, progress = self.job, self.job.progress
        self.has_stepped = True
        self._note_world(before)
        compares = crossed(updates, progress.updates, _COMPARE_EVERY)
        if compares:
            self.fingerprint.start(progress.updates)
        # The hashes of a round of one update are compared after the next one, without waiting.
        if not compares or progress.updates > updates + 1:
            self.fingerprint.finish()
        logs = crossed(updates, progress.updates, job.config.log_every)
        if logs or evaluates(job, before, progress.samples):
            self._log()
        self._settle(before)
        with self._aside("telling"):
            self.checkpoints.report()
        self.clock.lap("update")

    def _note_world(self, before: int) -> None:
        """Called after each round, which began at `before` samples, for elastic runs."""

    def _note_push(self, count: int) -> None:
        """Called after each update of this rank within a round, for elastic runs."""

    def _must_leave_world(self) -> bool:
        """Return whether the launcher asked this rank to leave its world, in an elastic run."""
        return False

    def _leave_world(self) -> None:
        """Called after a round if any rank must leave the world."""

    def _settle(self, before: int) -> None:
        """Do what is due after the last round, which began at `before` samples.

        This is an evaluation, growth of the batch and a checkpoint. If the evaluation is
        interrupted, `progress.owes` records that all of it is still due.
        """
        job, progress = self.job, self.job.progress
        progress.owes = before
        is_best = evaluates(job, before, progress.samples) and self._evaluate()
        progress.owes = None
        self._grow()
        if is_best or saves(job, before, progress.samples):
            self._save(is_best)
        elif self.checkpoints.are_due():
            self._save()

    def _log(self) -> None:
        """Send the callbacks a progress event on what all ranks did since the last one."""
        self.clock.lap("update")
        seconds = sum(self.clock.seconds.values())
        event = progress_event(self.job, self.clock, self.since_log, self.own, self.reported)
        if event is not None:
            with self._aside("telling"):
                self.callbacks.progress(event)
        self.training_seconds += seconds
        self.seconds_since_evaluation += seconds
        self.since_log = self.job.trainer.task.tally()

    def _evaluate(self) -> bool:
        """Evaluate on the validation split. Return whether the score is the best so far."""
        job, progress = self.job, self.job.progress
        trained = progress.since.score()
        self.clock.lap("update")
        started = time.perf_counter()
        if broken := first_not_finite(job.trainer.model):
            self._judge(job.watch.broken(broken, trained.loss), self.job.empty_batch())
        validation, num_bad = self._validate(), self._num_bad()
        # From here on no other rank is needed.
        self.validation = validation
        self.clock.skip()
        self.stopping.note_cost(EVALUATION, time.perf_counter() - started)
        is_best = progress.note(validation, job.trainer.task.metrics[0])
        epoch = -(-progress.samples // job.num_train)
        seconds, self.seconds_since_evaluation = self.seconds_since_evaluation, 0.0
        evaluated = Evaluated(
            epoch, progress.samples, trained, validation, seconds, is_best, num_bad
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
            flip=self.job.config.evaluation.flip,
            mistakes=mistakes,
            must_leave=self.stopping.must_leave,
        )

    def _grow(self) -> None:
        """Increase the batch if that is due."""
        job = self.job
        batch = job.growth.batch(job.progress.samples, job.noise)
        if batch == job.progress.batch:
            return
        weights, base = job.loaders["train"].shares, job.config.accumulation
        count = job.growth.num_micro_batches(batch, weights, base)
        message = f"the batch grows from {job.progress.batch} to {batch}"
        message += f", in {count} micro-batches" if count > 1 else ""
        self.callbacks.event(message, samples=job.progress.samples, batch=batch, pieces=count)
        job.progress.batch = job.loaders["train"].batch = batch
        job.set_num_micro_batches(count)

    def _num_bad(self) -> int:
        """Return the samples that all ranks have skipped so far. A collective.

        A sample that two ranks skipped in different epochs counts twice.
        """
        mine = sum(loader.num_bad for loader in self.job.loaders.values())
        return sum(agree.gather(self.job.world, mine))

    def _save(self, best: bool = False) -> None:
        with self._aside("saving"):
            self.checkpoints.save(best)

    @contextmanager
    def _aside(self, what: str) -> Iterator[None]:
        """Add the time within the context to `aside[what]`."""
        started = time.perf_counter()
        yield
        self.aside[what] += time.perf_counter() - started

    def _pause(self) -> Paused:
        progress = self.job.progress
        self.fingerprint.finish()
        self.checkpoints.finish(f"stopped after {progress.samples} of {self.job.total} samples")
        why = agree.gather(self.job.world, self.stopping.why)
        reason = next((each for each in why if each is not None), "a worker was asked to stop")
        self.callbacks.event(
            f"stopped and saved after {progress.samples} of {self.job.total} samples: {reason}",
            samples=progress.samples,
        )
        return Paused(progress.samples, reason, is_saved_here=self.job.world.rank == 0)

    # The end

    def _result(self, why: str) -> Result:
        job, progress = self.job, self.job.progress
        # The run was resumed after its last step.
        if self.validation is None:
            self.validation = self._validate()
        model, chosen = chosen_model(job, self.callbacks)
        mistakes = Mistakes(job.splits.classes)
        test = self._score(model, job.loaders["test"], mistakes)
        if problem := mistakes.write(job.out, job.world):
            self.callbacks.event(problem)
        if job.noise is not None and job.noise.steps:
            self.callbacks.event(
                job.noise.advice(progress.batch), noise_scale=finite(job.noise.scale)
            )
        trained = progress.samples - self.first_sample
        speed = trained / self.training_seconds if trained else 0.0
        seconds = time.perf_counter() - self.started
        return Result(
            test=test,
            validation=self.validation,
            images_per_second=speed,
            seconds_per_epoch=job.num_train / speed if speed else 0.0,
            seconds=seconds,
            out=job.out,
            samples=progress.samples,
            best=progress.best,
            chosen=chosen,
            why=why if progress.samples < job.total else "",
            aside=self.aside,
            num_bad=self._num_bad(),
            train=training_score(
                job, chosen, lambda loader: self._score(model, loader), self.callbacks
            ),
        )
