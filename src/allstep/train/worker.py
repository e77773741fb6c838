"""What one worker does, from its start to its end: join the others, agree on the run, train.

Rank 0 reads the config, looks for the data, makes the run folder or finds the checkpoint to go on from; the others take its word. So a
file that only rank 0's host has, or a name made from the time, means the same everywhere.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import allstep.torch as hvd
from allstep import comm
from allstep.runlog import RunLog
from allstep.train import agree, checkpoint
from allstep.train.checkpoint import Snapshot
from allstep.train.config import RunConfig
from allstep.train.display import Display
from allstep.train.fitting import check_config
from allstep.train.folder import Claimed, claim_folder
from allstep.train.prepare import prepare
from allstep.train.recipes import DEFAULT
from allstep.train.run import Paused, train
from allstep.train.tensorboard import TensorBoard
from allstep.train.watch import Record, Result, Watcher, Watchers
from allstep.world import World


@dataclass(frozen=True)
class Asked:
    """What the user asked for, before anybody looked whether it can be."""

    source: str = DEFAULT
    words: Sequence[str] = ()
    data: Path | None = None
    out: Path | None = None
    resume: bool = False
    max_seconds: float | None = None


def work(asked: Asked, launcher: str | None = None) -> Result | Paused | None:
    """Runs in every worker. None: the run had ended before."""
    world = comm.init(launcher)
    config, claimed, snapshot, notes = agree.rank_0_decides(world, lambda: _decide(asked, world))
    if claimed.has_ended:
        return None
    watchers = _watchers(claimed.path) if world.rank == 0 else []
    for note in notes if world.rank == 0 else []:
        say(note)
    try:
        result = train(config, world, claimed.path, watchers, snapshot=snapshot, max_seconds=asked.max_seconds)
    finally:
        Watchers(watchers).close()
    hvd.shutdown()
    comm.shutdown()  # not after a failure: a group with an operation under way would wait for peers that are gone
    return result


def _decide(asked: Asked, world: World) -> tuple[RunConfig, Claimed, Snapshot | None, list[str]]:
    prepared = prepare(asked.source, asked.words, asked.data)
    config = prepared.config.resolved(world.size)
    check_config(config, world.size)
    claimed = claim_folder(config, asked.out, asked.resume)
    notes = [prepared.note] if prepared.note else []
    if claimed.has_ended:
        say(ended(claimed))
    if not claimed.goes_on or claimed.has_ended:
        return config, claimed, None, notes
    found = checkpoint.newest(claimed.path / "checkpoints")
    notes += [f"not used: {complaint}" for complaint in found.complaints]
    notes += [] if found.snapshot else [f"{claimed.path}: has no whole checkpoint, so the run begins anew"]
    return config, claimed, found.snapshot, notes


def ended(claimed: Claimed) -> str:
    """Why there is nothing to do."""
    return f"{claimed.path}: this run has ended; look at it with `allstep report {claimed.path}`"


def say(line: str) -> None:
    """A line beside the output of the run."""
    print(f"allstep: {line}", file=sys.stderr, flush=True)


def _watchers(out: Path) -> list[Watcher]:
    return [Record(RunLog(out / "run.jsonl")), TensorBoard(out / "tensorboard"), Display()]
