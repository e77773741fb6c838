"""A worker of an elastic run: it trains in one world after the other, with the same job in memory.

```
 enter: all ranks compare the number of their commits
   none has a job:   rank 0 decides about the run, all build their jobs    (as in a fixed world)
   some differ:      the rank with most commits broadcasts its state
   place the job, pass on the duties of rank 0
      |
      v              PeerLost: undo the step in progress      <--.
   steps, evaluations ... ──────────────────────────────────────-+── rejoin: the next world
      |              LeaveWorld: the launcher asked for it    <--'
      v
    result
```

A *commit* is a finished update, or what is due after one (evaluation, growth, checkpoint). Ranks
are at most one apart. The broadcast goes into memory of its own and is loaded only when it is
complete, so a rank has a whole state at any time. Nothing is read from disk.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, NoReturn

from allstep import comm
from allstep.comm.group import agree
from allstep.comm.join.membership import Dismissed, Membership, Place
from allstep.errors import CollectiveTimeout, CommError, PeerLost
from allstep.train.checkpoint.broadcast import broadcast_snapshot
from allstep.train.config.run_config import ResolvedConfig
from allstep.train.folder.claim import has_ended
from allstep.train.health.stop_request import Stopping
from allstep.train.run.capture import capture, load
from allstep.train.run.duties import Duties
from allstep.train.run.opening_event import opening
from allstep.train.run.placed_job import Job, place
from allstep.train.run.progress import Paused
from allstep.train.run.setup import make_job
from allstep.train.run.worlds.changes import Changes, LeaveWorld, Totals
from allstep.train.run.worlds.elastic_loop import ElasticLoop
from allstep.train.watch.events import Result
from allstep.world import World

# The figures of a change that its event has on any rank. Times differ a little.
_IDENTIFYING = ("generation", "position", "workers", "lost", "joined")
# Worlds in a row without a finished step, after which the error is not one of lost workers.
_MAX_FRUITLESS = 20


class _Standing(NamedTuple):
    """How far a rank is, and whether it has the duties of rank 0."""

    commits: int | None
    has_duties: bool


@dataclass(frozen=True)
class _Facts:
    """What a worker that joins must know besides the state."""

    config: ResolvedConfig
    out: Path
    totals: Totals


class Generations:
    """The worlds of one worker.

    `start` makes the job of a new or resumed run, together with all ranks; None if the run has
    ended. `standby` is the job that a worker prepared before it joined, with the config that it
    expects.
    """

    def __init__(
        self,
        member: Membership,
        duties: Duties,
        stopping: Stopping,
        start: Callable[[World], Job | None],
        standby: tuple[ResolvedConfig, Job] | None = None,
    ) -> None:
        self._member, self._duties, self._stopping = member, duties, stopping
        self._start, self._standby = start, standby
        self._changes = Changes()
        self._run: ElasticLoop | None = None
        self._num_fruitless = 0

    def go(self, world: World) -> Result | Paused | None:
        """Train from `world` on, to the end of the run. None if it had ended before."""
        if not self._member.joins_later:
            self._changes.start(self._place)
        while True:
            try:
                self._enter(world)
                return None if self._run is None else self._finish(self._run)
            except (PeerLost, CollectiveTimeout) as error:
                world = self._next(error)
            except LeaveWorld:
                world = self._next()

    def _finish(self, run: ElasticLoop) -> Result | Paused:
        """Run to the end, and leave only when rank 0 has recorded it."""
        result = run.go()
        # The last world may have had no step.
        run.report_change(self._changes.end_change())
        if isinstance(result, Result):
            run.report_totals()
            run.callbacks.end(result)
        try:
            agree.gather(run.job.world, None)
        except PeerLost:
            if not has_ended(run.job.out):
                raise
        if isinstance(result, Paused):
            run.report_totals()
        run.close()
        return result

    # From world to world

    def _next(self, error: CommError | None = None) -> World:
        """Leave the world and return the next one; `error` is why, None if it ends in order."""
        self._changes.leave(was_lost=error is not None)
        run = self._run
        if run is not None:
            self._num_fruitless = 0 if run.has_stepped else self._num_fruitless + 1
            run.interrupt()
        if error is not None and self._num_fruitless > _MAX_FRUITLESS:
            raise error
        try:
            return comm.rejoin(self._commits)
        except Dismissed as end:
            self._leave(end)

    def _leave(self, end: Dismissed) -> NoReturn:
        """End this worker, which has no place in the next world; save the state if asked to."""
        run = self._run
        if run is not None and end.saves:
            run.job.world = World.alone()
            if not self._duties.are_taken:
                self._duties.take_over(run.job.out, opening(run.job, with_flop=False))
            run.save_alone("too few workers are left, or the run was asked to stop")
            self._changes.stop(end.num_left)
            run.report_totals()
        # Frees the folder for the new rank 0 first; a checkpoint may still be written.
        self._duties.close()
        if run is not None:
            run.close()
        raise end

    @property
    def _commits(self) -> int | None:
        """How far this worker is; a worker that has not received a state yet has none."""
        if self._run is not None:
            return self._run.commits
        return None if self._member.joins_later else 0

    def _enter(self, world: World) -> None:
        """Give every rank of `world` the same state and its place."""
        mine = _Standing(None if self._run is None else self._run.commits, self._duties.are_taken)
        standings = agree.gather(world, mine)
        if all(each.commits is None for each in standings):
            self._begin(world)
            return
        source = max(range(world.size), key=lambda rank: standings[rank].commits or -1)
        job = None if self._run is None else self._run.job
        if len({each.commits for each in standings}) > 1:
            needs_state = mine.commits != standings[source].commits
            job = self._synchronize(world, source, needs_state)
        assert job is not None
        place(job, world)
        if self._run is None:
            self._run = self._make_run(job)
        self._pass_duties(self._run, standings[0])
        self._run.enter()
        self._changes.form(self._place, *_position_of(job))

    @property
    def _place(self) -> Place:
        assert self._member.place is not None
        return self._member.place

    def _begin(self, world: World) -> None:
        """Start the run, or resume it from its checkpoint."""
        # Of an attempt in an earlier world.
        self._duties.close()
        job = self._start(world)
        if job is None:
            return
        self._run = self._make_run(job)
        self._changes.begin(self._place, *_position_of(job))
        opened = opening(job, with_flop=self._duties.are_taken)
        self._duties.watch_speed()
        self._duties.callbacks.start(opened)

    def _make_run(self, job: Job) -> ElasticLoop:
        return ElasticLoop(job, self._stopping, self._changes, self._duties)

    def _synchronize(self, world: World, source: int, needs_state: bool) -> Job:
        """Broadcast the state of the rank `source`; load it if this rank needs it."""
        run, is_source = self._run, world.rank == source
        facts = agree.one_decides(world, source, self._facts)
        snapshot = broadcast_snapshot(
            world, capture(run.job) if run is not None and is_source else None, source
        )
        job = run.job if run is not None else self._job_of(facts)
        if needs_state:
            assert snapshot is not None
            load(job, snapshot)
            self._changes.take(facts.totals)
        return job

    def _facts(self) -> _Facts:
        assert self._run is not None
        return _Facts(self._run.job.config, self._run.job.out, self._changes.totals)

    def _job_of(self, facts: _Facts) -> Job:
        """Return the job that was prepared on standby, or build one if it is of another run."""
        if self._standby is not None:
            expected, job = self._standby
            if expected == facts.config:
                job.config = facts.config
                job.move_to(facts.out)
                return job
        return make_job(facts.config, World.alone(), facts.out, worker=self._member.number)

    def _pass_duties(self, run: ElasticLoop, of_rank_0: _Standing) -> None:
        """Let the new rank 0 take over the duties, if another worker had them."""
        if run.job.world.rank != 0 and self._duties.are_taken:
            self._duties.close()
        if not of_rank_0.has_duties:
            opened = opening(run.job, with_flop=False)
            if run.job.world.rank == 0:
                self._duties.take_over(run.job.out, opened)
                self._report_unrecorded(run)

    def _report_unrecorded(self, run: ElasticLoop) -> None:
        """Report the last change, if rank 0 was lost between the step after it and its record."""
        if (change := self._changes.unconfirmed) is None:
            return
        text, figures = change
        known = {name: figures[name] for name in _IDENTIFYING}
        if not self._duties.has_recorded(run.job.out, known):
            run.callbacks.event(text, samples=run.job.progress.samples, **figures)


def _position_of(job: Job) -> tuple[int, bool]:
    """Return the position of a job, and whether what follows its last update is due."""
    return job.progress.samples, job.progress.owes is not None
