"""What one worker does, from its start to its end: join the others, agree on the run, train.

Rank 0 reads the config, looks for the data and makes the run folder; the others take its word. So a file that only rank 0's host has,
or a name made from the time, means the same everywhere.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import allstep.torch as hvd
from allstep import comm
from allstep.runlog import RunLog
from allstep.train import agree
from allstep.train.config import RunConfig
from allstep.train.display import Display
from allstep.train.folder import make_run_folder
from allstep.train.prepare import prepare
from allstep.train.recipes import DEFAULT
from allstep.train.run import train
from allstep.train.watch import Record, Result, Watcher
from allstep.world import World


@dataclass(frozen=True)
class Asked:
    """What the user asked for, before anybody looked whether it can be."""

    source: str = DEFAULT
    words: Sequence[str] = ()
    data: Path | None = None
    out: Path | None = None


def work(asked: Asked, launcher: str | None = None) -> Result:
    """Runs in every worker."""
    world = comm.init(launcher)
    config, out = agree.rank_0_decides(world, lambda: _decide(asked, world))
    watchers = _watchers(out) if world.rank == 0 else []
    try:
        result = train(config, world, out, watchers)
    finally:
        for watcher in watchers:
            watcher.close()
    hvd.shutdown()
    comm.shutdown()  # not after a failure: a group with an operation under way would wait for peers that are gone
    return result


def _decide(asked: Asked, world: World) -> tuple[RunConfig, Path]:
    prepared = prepare(asked.source, asked.words, asked.data)
    if prepared.note:
        print(f"allstep: {prepared.note}", file=sys.stderr, flush=True)
    config = prepared.config.resolved(world.size)
    return config, make_run_folder(config, asked.out)


def _watchers(out: Path) -> list[Watcher]:
    return [Record(RunLog(out / "run.jsonl")), Display()]
