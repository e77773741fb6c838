"""What one worker does, from its start to its end: join the others, agree on the run, train.

Rank 0 reads the config, looks for the data, makes the run folder or finds the checkpoint to go on from; the others take its word. So a
file that only rank 0's host has, or a name made from the time, means the same everywhere.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from allstep import comm
from allstep.comm.group import decide as agree
from allstep.console.escape import print_notice
from allstep.errors import ConfigError, DataError
from allstep.machine import keep_freed_memory
from allstep.runlog import RunLog
from allstep.train.checkpoint import format as checkpoint
from allstep.train.checkpoint.format import Snapshot
from allstep.train.config.check import check_config
from allstep.train.config.recipes import DEFAULT
from allstep.train.config.run_config import RunConfig
from allstep.train.folder.claim import RECORD, Claimed, as_begun, claim_folder, expect_run, has_ended
from allstep.train.folder.lock import hold
from allstep.train.folder.read import run_config
from allstep.train.health.checkpoint_state import check_batch, check_resumed
from allstep.train.run.loop import Paused, train
from allstep.train.run.prepare import prepare
from allstep.train.watch.callback import Callback, Callbacks
from allstep.train.watch.events import Result
from allstep.train.watch.record import Record
from allstep.train.watch.tensorboard import TensorBoard
from allstep.train.watch.terminal import Display
from allstep.world import World


@dataclass(frozen=True)
class Asked:
    """What the user asked for, before anybody looked whether it can be."""

    source: str = DEFAULT
    words: Sequence[str] = ()
    data: Path | None = None
    out: Path | None = None
    resume: bool = False
    must_exist: bool = False
    """With resume: the run to go on with; it is an error if there is none."""
    max_seconds: float | None = None


@dataclass
class _Rank0:
    """What only rank 0 has of a run: the hold on its folder, the files it writes."""

    held: ExitStack = field(default_factory=ExitStack)
    callbacks: list[Callback] = field(default_factory=list)

    def close(self) -> None:
        Callbacks(self.callbacks).close()
        self.held.close()


def work(asked: Asked, launcher: str | None = None) -> Result | Paused | None:
    """Runs in every worker. None: the run had ended before."""
    keep_freed_memory()
    world, mine = comm.init(launcher), _Rank0()
    try:
        config, claimed, snapshot, notes = agree.rank_0_decides(world, lambda: _decide(asked, world, mine))
        if claimed.has_ended:
            return None
        for note in notes if world.rank == 0 else []:
            print_notice(note)
        result = train(config, world, claimed.path, mine.callbacks, snapshot=snapshot, max_seconds=asked.max_seconds)
    finally:
        mine.close()
    comm.shutdown()  # not after a failure: a group with an operation under way would wait for peers that are gone
    return result


def _decide(asked: Asked, world: World, mine: _Rank0) -> tuple[RunConfig, Claimed, Snapshot | None, list[str]]:
    if asked.must_exist and asked.out is not None:
        expect_run(asked.out)
    try:
        prepared = prepare(asked.source, asked.words, asked.data)
    except DataError:
        # A run that has ended needs no data any more.
        if asked.resume and asked.out is not None and has_ended(asked.out):
            claimed = Claimed(asked.out, has_ended=True)
            print_notice(claimed.farewell())
            # Nothing is built from this config, so nothing of it is executed.
            return run_config(asked.out, trust=True), claimed, None, []
        raise
    config = prepared.config.resolved(world.size)
    check_config(config, world.size)
    claimed = _claim(config, asked, mine)
    config = as_begun(config, claimed.path)
    if claimed.has_ended:
        print_notice(claimed.farewell())
        return config, claimed, None, []
    notes = [prepared.note] if prepared.note else []
    if not claimed.goes_on:
        return config, claimed, None, notes
    found = checkpoint.newest(claimed.path / "checkpoints", partial(_check, config))
    notes += [f"not used: {complaint}" for complaint in found.complaints]
    if not found.snapshot and found.complaints:
        raise DataError(
            f"{claimed.path}: no checkpoint is whole: {'; '.join(found.complaints)}; put back a copy of one, or move "
            f"{claimed.path / 'checkpoints'} away, and the run begins anew"
        )
    notes += [] if found.snapshot else [f"{claimed.path}: has no checkpoint yet, so the run begins anew"]
    return config, claimed, found.snapshot, notes


def _check(config: RunConfig, snapshot: Snapshot) -> None:
    """CheckpointError unless the run of `config` can continue from there."""
    check_resumed(snapshot)
    check_batch(snapshot, config)


def _claim(config: RunConfig, asked: Asked, mine: _Rank0) -> Claimed:
    """The folder, ours alone unless the run in it has ended, and its files open."""
    claimed = claim_folder(config, asked.out, asked.resume)
    if claimed.has_ended:
        return claimed
    mine.held.enter_context(hold(claimed.path))
    claimed = claim_folder(config, claimed.path, asked.resume)  # who held it before may have begun a run, or ended it
    if not claimed.has_ended:
        mine.callbacks = _callbacks(claimed.path)
    return claimed


def _callbacks(out: Path) -> list[Callback]:
    try:
        record = RunLog(out / RECORD)
    except OSError as error:
        raise ConfigError(f"{out / RECORD}: cannot be written: {error.strerror or error}") from error
    return [Record(record), TensorBoard(out / "tensorboard"), Display()]
