"""A worker from its start to its end: join the process group, agree on the run, train.

Rank 0 reads the config, finds the data, and creates the run folder or finds the checkpoint from
which to resume; the other ranks receive its decision. So all ranks agree on a file that only rank
0's host has, and on a name that contains the time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from allstep import comm
from allstep.comm.group import agree
from allstep.comm.join.membership import Membership, membership
from allstep.console.escape import print_notice
from allstep.errors import DataError
from allstep.machine import keep_freed_memory
from allstep.train.checkpoint import write_and_read as checkpoint
from allstep.train.checkpoint.broadcast import broadcast_snapshot
from allstep.train.checkpoint.write_and_read import Snapshot
from allstep.train.config.check_config import check_config, check_elastic
from allstep.train.config.run_config import ResolvedConfig
from allstep.train.folder.claim import (
    Claimed,
    as_begun,
    claim_folder,
    expect_run,
    has_ended,
)
from allstep.train.health.checkpoint_state import check_batch, check_optimizer, check_resumed
from allstep.train.health.stop_request import Stopping
from allstep.train.run.duties import Duties
from allstep.train.run.loop import train
from allstep.train.run.placed_job import Job
from allstep.train.run.prepare import prepare
from allstep.train.run.progress import Paused
from allstep.train.run.setup import make_job
from allstep.train.run.train_request import TrainRequest
from allstep.train.run.worlds.generations import Generations
from allstep.train.run.worlds.standby import prepare_standby
from allstep.train.watch.events import Result
from allstep.world import World


@dataclass(frozen=True)
class _Decision:
    """The decision of rank 0 about the run, for all ranks."""

    claimed: Claimed
    config: ResolvedConfig | None = None
    """None if the run in the folder has ended."""
    notes: Sequence[str] = ()


def work(asked: TrainRequest, launcher: str | None = None) -> Result | Paused | None:
    """Train the requested run on this worker. Return None if the run had already ended.

    `launcher` names the launcher to trust for rank and size; None detects it.
    """
    keep_freed_memory()
    duties, member = Duties(), membership()
    try:
        if member is not None:
            result = _work_elastic(asked, member, duties)
        else:
            result = _work_fixed(asked, comm.init(launcher), duties)
    finally:
        duties.close()
    # Not after a failure: a process group with an operation in flight would wait for ranks that
    # have exited.
    comm.shutdown()
    return result


def _work_fixed(asked: TrainRequest, world: World, duties: Duties) -> Result | Paused | None:
    """Train in a world that does not change: a lost rank ends the run."""
    decision = _agree(asked, world, duties)
    if decision.config is None:
        return None
    return train(
        decision.config,
        world,
        decision.claimed.path,
        duties.callbacks.callbacks,
        snapshot=broadcast_snapshot(world, duties.snapshot),
        max_seconds=asked.max_seconds,
    )


def _work_elastic(
    asked: TrainRequest, member: Membership, duties: Duties
) -> Result | Paused | None:
    """Train in an elastic run, in one world after the other."""

    def start(world: World) -> Job | None:
        decision = _agree(asked, world, duties)
        if decision.config is None:
            return None
        snapshot = broadcast_snapshot(world, duties.snapshot)
        folder = decision.claimed.path
        return make_job(decision.config, world, folder, snapshot, member.number)

    member.prints_changes = True
    standby = None
    if member.joins_later:
        standby = prepare_standby(asked, World.detect().size, member.number)
    world = comm.init()
    with Stopping(asked.max_seconds) as stopping:
        return Generations(member, duties, stopping, start, standby).go(world)


def _agree(asked: TrainRequest, world: World, duties: Duties) -> _Decision:
    """Return the decision of rank 0, on all ranks, and print its notes."""
    decision = agree.rank_0_decides(world, lambda: _decide(asked, world, duties))
    for note in decision.notes if world.rank == 0 else []:
        print_notice(note)
    return decision


def _decide(asked: TrainRequest, world: World, duties: Duties) -> _Decision:
    if asked.must_exist and asked.out is not None:
        expect_run(asked.out)
    try:
        prepared = prepare(asked.source, asked.overrides, asked.data)
    except DataError:
        # A run that has ended does not need its data.
        if asked.resume and asked.out is not None and has_ended(asked.out):
            return _ended(Claimed(asked.out, has_ended=True))
        raise
    config = prepared.config.resolved(world.size)
    check_config(config, world.size)
    if (member := membership()) is not None:
        check_elastic(prepared.config, world.size, member.sizes)
    claimed = _claim(config, asked, duties)
    if claimed.has_ended:
        return _ended(claimed)
    config = as_begun(config, claimed.path)
    notes = [prepared.note] if prepared.note else []
    if claimed.resumes:
        notes += _find_checkpoint(config, claimed.path, duties)
    return _Decision(claimed, config, notes)


def _ended(claimed: Claimed) -> _Decision:
    print_notice(claimed.ended_message())
    return _Decision(claimed)


def _find_checkpoint(config: ResolvedConfig, folder: Path, duties: Duties) -> list[str]:
    """Read the newest whole checkpoint. Return notes on those that are not used."""
    found = checkpoint.newest(folder / "checkpoints", partial(_check, config))
    if not found.snapshot and found.complaints:
        raise DataError(
            f"{folder}: no checkpoint is complete: {'; '.join(found.complaints)}; restore a copy of"
            f" one, or move {folder / 'checkpoints'} away to start the run from the beginning"
        )
    duties.snapshot = found.snapshot
    notes = [f"not used: {complaint}" for complaint in found.complaints]
    if not found.snapshot:
        notes.append(f"{folder}: has no checkpoint yet, so the run starts from the beginning")
    return notes


def _check(config: ResolvedConfig, snapshot: Snapshot) -> None:
    """Raise CheckpointError unless the run of `config` can resume from `snapshot`."""
    check_resumed(snapshot)
    check_batch(snapshot, config)
    check_optimizer(snapshot, config)


def _claim(config: ResolvedConfig, asked: TrainRequest, duties: Duties) -> Claimed:
    """Lock the run folder and open its files, unless the run in it has ended. Return the claim."""
    claimed = claim_folder(config, asked.out, asked.resume)
    if claimed.has_ended:
        return claimed
    duties.lock(claimed.path)
    # Again: the process that held the lock may have started a run in the folder, or ended it.
    claimed = claim_folder(config, claimed.path, asked.resume)
    if not claimed.has_ended:
        duties.open(claimed.path)
    return claimed
