"""A worker from its start to its end: join the process group, agree on the run, train.

Rank 0 reads the config, finds the data, and creates the run folder or finds the checkpoint from
which to resume; the other ranks receive its decision. So all ranks agree on a file that only rank
0's host has, and on a name that contains the time.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from allstep import comm
from allstep.comm.group import agree
from allstep.console.escape import print_notice
from allstep.errors import ConfigError, DataError
from allstep.machine import keep_freed_memory
from allstep.runlog import RunLog
from allstep.train.checkpoint import write_and_read as checkpoint
from allstep.train.checkpoint.broadcast import broadcast_snapshot
from allstep.train.checkpoint.write_and_read import Snapshot
from allstep.train.config.check_config import check_config
from allstep.train.config.run_config import ResolvedConfig
from allstep.train.folder.claim import (
    RECORD,
    Claimed,
    as_begun,
    claim_folder,
    expect_run,
    has_ended,
)
from allstep.train.folder.run_lock import hold
from allstep.train.health.checkpoint_state import check_batch, check_optimizer, check_resumed
from allstep.train.run.fault_events import recorded
from allstep.train.run.loop import train
from allstep.train.run.prepare import prepare
from allstep.train.run.progress import Paused
from allstep.train.run.train_request import TrainRequest
from allstep.train.watch.callback import Callback, Callbacks
from allstep.train.watch.events import Result
from allstep.train.watch.record_callback import Record
from allstep.train.watch.tensorboard import TensorBoard
from allstep.train.watch.terminal import Display
from allstep.world import World


@dataclass
class _Rank0:
    """What only rank 0 has: the lock on the run folder, the callbacks, the checkpoint it read."""

    held: ExitStack = field(default_factory=ExitStack)
    callbacks: list[Callback] = field(default_factory=list)
    snapshot: Snapshot | None = None

    def close(self) -> None:
        """Close the callbacks and release the lock."""
        Callbacks(self.callbacks).close()
        self.held.close()


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
    world, mine = comm.init(launcher), _Rank0()
    try:
        decision = agree.rank_0_decides(world, lambda: _decide(asked, world, mine))
        if decision.config is None:
            return None
        for note in decision.notes if world.rank == 0 else []:
            print_notice(note)
        with recorded(mine.callbacks):
            result = train(
                decision.config,
                world,
                decision.claimed.path,
                mine.callbacks,
                snapshot=broadcast_snapshot(world, mine.snapshot),
                max_seconds=asked.max_seconds,
            )
    finally:
        mine.close()
    # Not after a failure: a process group with an operation in flight would wait for ranks that
    # have exited.
    comm.shutdown()
    return result


def _decide(asked: TrainRequest, world: World, mine: _Rank0) -> _Decision:
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
    claimed = _claim(config, asked, mine)
    if claimed.has_ended:
        return _ended(claimed)
    config = as_begun(config, claimed.path)
    notes = [prepared.note] if prepared.note else []
    if claimed.resumes:
        notes += _find_checkpoint(config, claimed.path, mine)
    return _Decision(claimed, config, notes)


def _ended(claimed: Claimed) -> _Decision:
    print_notice(claimed.ended_message())
    return _Decision(claimed)


def _find_checkpoint(config: ResolvedConfig, folder: Path, mine: _Rank0) -> list[str]:
    """Read the newest whole checkpoint. Return notes on those that are not used."""
    found = checkpoint.newest(folder / "checkpoints", partial(_check, config))
    if not found.snapshot and found.complaints:
        raise DataError(
            f"{folder}: no checkpoint is complete: {'; '.join(found.complaints)}; restore a copy of"
            f" one, or move {folder / 'checkpoints'} away to start the run from the beginning"
        )
    mine.snapshot = found.snapshot
    notes = [f"not used: {complaint}" for complaint in found.complaints]
    if not found.snapshot:
        notes.append(f"{folder}: has no checkpoint yet, so the run starts from the beginning")
    return notes


def _check(config: ResolvedConfig, snapshot: Snapshot) -> None:
    """Raise CheckpointError unless the run of `config` can resume from `snapshot`."""
    check_resumed(snapshot)
    check_batch(snapshot, config)
    check_optimizer(snapshot, config)


def _claim(config: ResolvedConfig, asked: TrainRequest, mine: _Rank0) -> Claimed:
    """Lock the run folder and open its files, unless the run in it has ended. Return the claim."""
    claimed = claim_folder(config, asked.out, asked.resume)
    if claimed.has_ended:
        return claimed
    mine.held.enter_context(hold(claimed.path))
    # Again: the process that held the lock may have started a run in the folder, or ended it.
    claimed = claim_folder(config, claimed.path, asked.resume)
    if not claimed.has_ended:
        mine.callbacks = _callbacks(claimed.path)
    return claimed


def _callbacks(out: Path) -> list[Callback]:
    try:
        record = RunLog(out / RECORD)
    except OSError as error:
        raise ConfigError(
            f"{out / RECORD}: cannot be written: {error.strerror or error}"
        ) from error
    return [Record(record), TensorBoard(out / "tensorboard"), Display()]
