"""`allstep train --overfit N` and `--dry-run`: tests before a long run.

Both work in a temporary folder that is removed at the end. As with a run, the process without a
launcher checks config and data and starts the workers, and each worker runs the same command.
"""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from allstep.console.escape import print_line, print_notice
from allstep.files.atomic import replace_file
from allstep.process.python import run_module

if TYPE_CHECKING:
    from allstep.train.config.run_config import ResolvedConfig
    from allstep.world import World


_CONFIG, _STATUS = "config.yaml", "status"


@dataclass(frozen=True)
class Rehearsal:
    """A requested test."""

    source: str
    """Recipe or config file."""
    overrides: list[str]
    """Config keys to change, as KEY=VALUE."""
    data: Path | None
    """Folder with the dataset's files; None: the usual places."""
    out: Path | None
    """Folder of the run that would follow: a dry run writes to the same disk."""
    overfit: int | None
    """Number of samples to learn by heart; None: a dry run."""


def rehearse(asked: Rehearsal, workers: int | None, launcher: str | None) -> int:
    """Start the workers or, under a launcher, work as one of them; return the exit status."""
    from allstep.train.config.num_workers import check_num_workers
    from allstep.world import NONE, World

    world = World.detect(launcher)
    if world.launcher == NONE:
        return _start(asked, workers)
    check_num_workers(workers, world)
    return _work(asked, launcher)


def _start(asked: Rehearsal, workers: int | None) -> int:
    """Check config and data, run the test on the workers and return its exit status."""
    from allstep.launch import launch
    from allstep.train.config.num_workers import default_num_workers, no_result
    from allstep.train.folder.scratch import make_scratch
    from allstep.train.run.prepare import check, prepare

    prepared = prepare(asked.source, asked.overrides, asked.data)
    check(prepared)
    if prepared.note:
        print_notice(prepared.note)
    folder = make_scratch(_place(asked))
    try:
        replace_file(folder / _CONFIG, prepared.config.to_yaml().encode())
        which = ["--dry-run"] if asked.overfit is None else ["--overfit", str(asked.overfit)]
        command = run_module(
            "allstep", "train", str(folder / _CONFIG), "--out", str(folder / "run"), *which
        )
        num_workers = workers or default_num_workers(prepared.config)
        code = launch(command, num_workers, env={**os.environ, "ALLSTEP_LAUNCHER": "allstep"})
        if code:
            return code
        if not (folder / _STATUS).exists():
            raise no_result("the outcome of the test")
        return int((folder / _STATUS).read_text())
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _place(asked: Rehearsal) -> Path | None:
    """Return the path next to which temporary files are created; None: no preference."""
    return None if asked.overfit is not None else asked.out or Path("runs") / "run"


def _work(asked: Rehearsal, launcher: str | None) -> int:
    """Run the test as a worker and return the exit status."""
    from allstep.cli.torch_import import import_torch

    import_torch(optimizers=True)
    from allstep import comm
    from allstep.comm.group import agree
    from allstep.train.folder.scratch import scratch
    from allstep.train.run.prepare import prepare

    world = comm.init(launcher)
    config = agree.rank_0_decides(
        world,
        lambda: prepare(asked.source, asked.overrides, asked.data).config.resolved(world.size),
    )
    report: Callable[[str], None] = print_line if world.rank == 0 else lambda line: None
    with scratch(world, asked.out or _place(asked)) as folder:
        code = (
            _learn(config, asked.overfit, world, folder, report)
            if asked.overfit
            else _dry_run(config, world, folder, report)
        )
        code = _hand_over(asked, world, code)
    comm.shutdown()
    return code


def _hand_over(asked: Rehearsal, world: "World", code: int) -> int:
    """Return the exit status of this worker.

    A failed test is not a failed worker: if our own launching process started it, the worker exits
    with 0, and rank 0 writes the result of the test to a file that the launching process reads.
    """
    if asked.out is None or Path(asked.source) != asked.out.parent / _CONFIG:
        return code
    if world.rank == 0:
        (asked.out.parent / _STATUS).write_text(str(code))
    return 0


def _learn(
    config: "ResolvedConfig",
    count: int,
    world: "World",
    folder: Path,
    report: Callable[[str], None],
) -> int:
    """Test whether the model learns `count` samples by heart; return the exit status."""
    from allstep.train.check.overfit import learn, simplified, verdict

    simple, off = simplified(config, count)
    report(f"learning {count} samples by heart, in batches of {simple.batch}")
    if off:
        report(f"switched off: {', '.join(off)}")
    learned = learn(simple, world, folder, report)
    report(verdict(learned))
    return 0 if learned.by_heart else 1


def _dry_run(
    config: "ResolvedConfig", world: "World", folder: Path, report: Callable[[str], None]
) -> int:
    """Run one of each phase and print times, memory and a forecast; return the exit status."""
    from allstep.console.text_table import columns
    from allstep.train.check.dry_run import forecast, rehearse, table

    report(f"dry run with {world.size} worker{'s' if world.size > 1 else ''}")
    rehearsed = rehearse(config, world, folder)
    for line in [*columns(list(table(rehearsed))), *forecast(rehearsed)]:
        report(line)
    return 0 if rehearsed.fits else 1
