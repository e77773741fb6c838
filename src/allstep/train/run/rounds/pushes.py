"""The rounds of asynchronous training: each party claims samples and pushes, up to a common limit.

```
party 0   claim ── forward, backward ── push ── claim ── ...          |
party 1   claim ───── forward, backward ───── push ── claim ── ...    | synchronize
          '-- from here on no party waits for another, except as the mode demands
```

A round ends at the next position at which something is due (`due`), or earlier: at a request to
stop, to leave the world or to save, which any party passes on through the claims. At its end, the
synchronization point, all parties have the same weights; running statistics are averaged by
samples, and evaluations and checkpoints are those of synchronous training.

The random numbers of a step depend on the position of its claim and not on the party, so that a
replay repeats them (D19).
"""

import math
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import closing

import torch

from allstep import faults
from allstep.data import Batch
from allstep.errors import UserError
from allstep.kvstore.training import Claim, SharedModel, SyncPoint
from allstep.train.folder import order_file
from allstep.train.folder.order_file import LoggedRound
from allstep.train.run.progress_event import OwnWork
from allstep.train.run.rounds.due import next_due
from allstep.train.run.rounds.live_lines import LiveLines
from allstep.train.run.rounds.round import Agreement, Surroundings
from allstep.train.run.rounds.share_stream import raise_together
from allstep.train.step.after_step import StepReport
from allstep.train.step.step import reduce_step, update_weights
from allstep.train.task.tally import Tally
from allstep.train.watch.events import PartyFigures, Synchronized

# Seconds in which the parties of a host notice that one is lost, on a busy machine.
_NOTICED_WITHIN = 3.0


class Pushes:
    """Rounds of `sync=async`, `stale:S`, `clock:S`, `lazy:K` and `elastic:H`."""

    def __init__(self, around: Surroundings) -> None:
        self._around = around
        self._live = LiveLines(around)
        # Claims that were taken for the loader and whose step is not done.
        self._taken: deque[Claim] = deque()
        self._error: UserError | None = None
        # When the launcher first asked to leave this world.
        self._asked_at = math.inf
        self._own = OwnWork(around.job.trainer.optimizer.traffic)
        self._start_sums()

    @property
    def _shared(self) -> SharedModel:
        shared = self._around.job.shared
        assert shared is not None, "set-up makes it for these modes"
        return shared

    def _start_sums(self) -> None:
        self._tally = Tally.of_training(self._around.job.trainer.task)
        self._last = self._around.job.empty_batch()
        self._samples = self._claimed = self._steps = 0
        self._waited = 0.0

    def go(self) -> Agreement:
        """Train up to the next synchronization point."""
        job, progress = self._around.job, self._around.job.progress
        self._start_sums()
        self._live.start()
        self._shared.begin_round(progress.samples, next_due(job), progress.batch)
        while (point := self._to_point()) is None:
            # A lost party has left claims, which are taken by the others.
            pass
        return self._agree(point)

    # Within the round

    def _to_point(self) -> SyncPoint | None:
        """Take claims until there are no more; return the synchronization point, if it is one."""
        self._take_claims()
        self._around.clock.lap("input")
        traffic = self._own.traffic
        values = [self._samples, self._waited, torch.get_num_threads(), *traffic]
        point = self._shared.synchronize(values)
        if point is not None:
            self._own.drop(traffic)
        self._around.clock.lap("wait")
        return point

    def _take_claims(self) -> None:
        job = self._around.job
        largest = max(1, job.progress.batch // max(1, job.world.size))
        loader = job.loaders["train"]
        with closing(loader.claimed(self._claims(), largest)) as batches:
            while (batch := self._next(batches)) is not None:
                self._step(batch, self._taken.popleft())
                self._ask_for_end()
        if self._error is not None:
            self._shared.claims.request_stop()
            self._skip_claims()

    def _claims(self) -> Iterator[tuple[int, int]]:
        while (claim := self._shared.claims.next()) is not None:
            self._taken.append(claim)
            yield claim.start, claim.count

    def _next(self, batches: Iterator[Batch]) -> Batch | None:
        """Return the next batch; None at the end or after an error, which `_error` then has."""
        try:
            batch = next(batches, None)
            if batch is not None:
                job = self._around.job
                job.trainer.task.check_targets(batch, job.loaders["train"])
            return batch
        except UserError as error:
            self._error = error
            return None

    def _step(self, batch: Batch, claim: Claim) -> None:
        """Compute the gradient of a claim, and push it."""
        around, trainer = self._around, self._around.job.trainer
        begun, clock = time.perf_counter(), around.clock
        if faults.active is not None:
            faults.active.at_step(self._number_of_step, batch.samples)
        clock.lap("input")
        self._shared.begin(claim)
        clock.lap("wait")
        tally = reduce_step(trainer, batch, claim.count, clock)
        if batch.weight:
            update_weights(trainer, claim.start, clock)
            self._note_wait()
            around.has_pushed(self._steps + 1)
        else:
            trainer.optimizer.discard()
            self._shared.skip()
        self._tally, self._last = self._tally + tally, batch
        self._samples += batch.weight
        self._claimed += claim.count
        self._steps += 1
        self._live.note(self._tally, self._claimed)
        # A stop is after the claims that are taken already.
        taken = (1 + len(self._taken)) * (time.perf_counter() - begun)
        if self._steps > 1:
            around.stopping.note_cost("step", taken)

    @property
    def _number_of_step(self) -> int:
        """The number of this party's step in the run, for faults; exact with equal parties."""
        job = self._around.job
        return job.progress.updates // job.world.size + self._steps + 1

    def _note_wait(self) -> None:
        """Count the time for which the last push waited as such, and not as its update."""
        waited, seconds = self._shared.waited, self._around.clock.seconds
        self._waited += waited
        seconds["update"] -= waited
        seconds["wait"] += waited

    def _ask_for_end(self) -> None:
        """End the round for all parties if something is due that no position decides."""
        around = self._around
        saves = around.job.world.rank == 0 and around.is_save_due()
        stops = around.stopping.why is not None or self._must_leave()
        if saves or stops or not math.isfinite(self._tally.loss):
            self._shared.claims.request_stop()

    def _must_leave(self) -> bool:
        """Return whether the launcher wants this world to end now.

        After a loss it does so as well, but the living parties finish the round first. It may
        notice a loss a moment before this party can.
        """
        if not self._around.must_leave_world():
            return False
        now = time.perf_counter()
        self._asked_at = min(self._asked_at, now)
        return now - self._asked_at > _NOTICED_WITHIN and not self._shared.newly_lost()

    def _skip_claims(self) -> None:
        """Count the claims that are left as done, since all parties end with our error."""
        while self._taken:
            self._shared.begin(self._taken.popleft())
            self._shared.skip()

    # At the synchronization point

    def _agree(self, point: SyncPoint) -> Agreement:
        around, job = self._around, self._around.job
        stops, failed = around.stopping.why is not None, self._error is not None
        report = StepReport(
            self._tally,
            self._samples,
            stops,
            failed,
            around.clock.per_sample,
            around.must_leave_world(),
        )
        outcome = job.after_step.exchange(report)
        around.clock.lap("wait")
        if outcome.failed:
            raise_together(job, self._error)
        job.after_step.statistics.keep()
        if job.world.rank == self._shared.leader:
            self._record(point)
        lost = "; ".join(self._shared.lost.values())
        return Agreement(
            outcome, point.position, len(point.pushes), self._last, self._claimed, lost
        )

    def _record(self, point: SyncPoint) -> None:
        """Append the round to the order log, and report its figures."""
        around, job = self._around, self._around.job
        values = {rank: each.tolist() for rank, each in point.values.items()}
        entry = LoggedRound(
            job.progress.samples,
            point.position,
            job.progress.batch,
            {rank: int(row[0]) for rank, row in values.items()},
            {rank: int(row[2]) for rank, row in values.items()},
            tuple(tuple(push) for push in point.pushes),
        )
        try:
            order_file.append(job.out, entry)
        except OSError as error:
            around.callbacks.event(
                f"the order log was not written: {error.strerror or error}; this run cannot be"
                " replayed from here on"
            )
        around.callbacks.synchronized(_figures(point, values))

    def undo(self) -> None:
        """Return to the running statistics of the last synchronization point."""
        self._around.job.after_step.statistics.restore()

    def close(self) -> None:
        """Give this party weights and state of its own, and release the shared ones."""
        job = self._around.job
        job.trainer.optimizer.close()
        job.shared = None
        self._live.close()


def _figures(point: SyncPoint, values: dict[int, list[float]]) -> Synchronized:
    """Return the figures of a synchronization point by party."""
    ages: dict[int, Counter[int]] = {rank: Counter() for rank in values}
    last = {push.party: push for push in point.pushes}
    for push in point.pushes:
        ages.setdefault(push.party, Counter())[push.age] += 1
    parties = {}
    for rank, counts in sorted(ages.items()):
        samples, waited, _, sent, received = values.get(rank, (0.0,) * 5)
        parties[rank] = PartyFigures(
            int(samples),
            counts.total(),
            waited,
            dict(sorted(counts.items())),
            int(sent),
            int(received),
            last[rank].read if rank in last else point.version,
            last[rank].made if rank in last else 0,
        )
    torn = sum(push.is_torn for push in point.pushes)
    return Synchronized(point.position, point.version, parties, torn)
