"""`allstep train`: train a model from a recipe or a config file.

Without a launcher this process is the launching one: it checks config and data (before torch is
imported, so errors in the input are reported at once), creates the run folder and starts the
workers. Under a launcher (allstep run, torchrun, mpirun, srun) it is a worker.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from allstep.cli.elastic_options import ElasticOptions
from allstep.cli.numbers import MOST, between
from allstep.cli.options import (
    DataFolder,
    Faults,
    Launcher,
    MaxFailures,
    StopSignal,
    Trust,
    use_stop_signal,
)
from allstep.console.escape import print_line, print_notice
from allstep.console.progress_bar import file_bars
from allstep.process.python import run_module

if TYPE_CHECKING:
    from allstep.train.health.requeue import JobRequeue
    from allstep.train.run.train_request import TrainRequest

_AUTO = "auto"

Arguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="RECIPE|CONFIG.yaml KEY=VALUE",
        help="Recipe or config file to train, and config keys to change.",
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(
        "--workers",
        "-n",
        callback=between("--workers", 1, MOST),
        help="Number of workers (default: one per GPU, or per core, up to 8).",
    ),
]
MinWorkers = Annotated[
    int | None,
    typer.Option(
        "--min-workers",
        callback=between("--min-workers", 1, MOST),
        help="Continue without lost workers, down to this many; replace them when possible.",
    ),
]
MaxWorkers = Annotated[
    int | None,
    typer.Option(
        "--max-workers",
        callback=between("--max-workers", 1, MOST),
        help="With --min-workers: largest number of workers (default: --workers).",
    ),
]
Spares = Annotated[
    int | None,
    typer.Option(
        "--spares",
        callback=between("--spares", 0, MOST),
        help="With --min-workers: further workers that wait to replace lost ones at once.",
    ),
]
ElasticTimeout = Annotated[
    float | None,
    typer.Option(
        "--elastic-timeout",
        metavar="SECONDS",
        help="With --min-workers: longest wait for workers below the minimum (default: 600).",
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        help=(
            "Run folder (default: runs/<recipe>-<time>, or <model>-on-<data>-<time> without a"
            " recipe)."
        )
    ),
]
Resume = Annotated[
    str | None,
    typer.Option(
        metavar="auto|DIR",
        help="auto: resume the run in --out, if there is one. DIR: resume the run in DIR.",
    ),
]
MaxTime = Annotated[
    str | None,
    typer.Option(
        metavar="TIME",
        help="Save and exit with status 75 within this time: 90 (seconds), 15m, 1h30m, 1:30:00.",
    ),
]
Requeue = Annotated[
    bool,
    typer.Option(
        "--requeue", help="In a Slurm job: requeue it by scontrol when it was stopped and saved."
    ),
]
MaxRequeues = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        callback=between("--max-requeues", 0, MOST),
        help="Requeue the job at most N times (default: 100).",
    ),
]
Strict = Annotated[
    bool, typer.Option("--strict", help="Stop at the first bad sample; short for data.strict=true.")
]
Overfit = Annotated[
    int | None,
    typer.Option(
        min=1, metavar="N", help="Test whether the model can learn N training samples by heart."
    ),
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help=(
            "Test one of each in a temporary folder: load data, step, evaluate, save and load a"
            " checkpoint."
        ),
    ),
]
ListRecipes = Annotated[bool, typer.Option("--list", help="List the recipes and exit.")]


def train(
    arguments: Arguments = None,
    workers: Workers = None,
    min_workers: MinWorkers = None,
    max_workers: MaxWorkers = None,
    spares: Spares = None,
    elastic_timeout: ElasticTimeout = None,
    max_failures: MaxFailures = None,
    out: Out = None,
    resume: Resume = None,
    max_time: MaxTime = None,
    stop_signal: StopSignal = None,
    requeue: Requeue = False,
    max_requeues: MaxRequeues = None,
    data: DataFolder = None,
    strict: Strict = False,
    trust: Trust = False,
    overfit: Overfit = None,
    dry_run: DryRun = False,
    fault: Faults = None,
    launcher: Launcher = None,
    list_recipes: ListRecipes = False,
) -> None:
    """Train a model from a recipe or a config file.

    Examples: `allstep train`, `allstep train digits epochs=5 optimizer.lr=0.1`, `allstep train
    mine.yaml`.
    """
    from allstep import faults
    from allstep.world import NONE, World

    if list_recipes:
        _list()
        return
    faults.add(fault or [])
    use_stop_signal(stop_signal)
    flags = (("data.strict=true", strict), (f"overfit={overfit}", overfit), ("trust=true", trust))
    overrides = [override for override, wanted in flags if wanted]
    request = _request(arguments or [], overrides, out, data, resume, max_time)
    elastic = ElasticOptions(min_workers, max_workers, spares, elastic_timeout, max_failures)
    elastic.check()
    if overfit is not None or dry_run:
        raise typer.Exit(_rehearse(request, overfit, dry_run, workers, launcher))
    from allstep.launch import RESUBMIT
    from allstep.train.config.num_workers import check_num_workers
    from allstep.train.health.stop_request import exit_on_signal, ignore_stop_signals

    world = World.detect(launcher)
    before_exit = _requeuing(requeue, max_requeues, world.rank)
    with exit_on_signal(before_exit):
        if world.launcher == NONE:
            code = _start(request, workers, elastic)
        else:
            elastic.check_launcher(world.launcher)
            check_num_workers(workers, world)
            code = _work(request, launcher, before_exit)
    if code == RESUBMIT:
        with ignore_stop_signals():
            before_exit()
    raise typer.Exit(code)


def _requeuing(requeue: bool, max_requeues: int | None, rank: int) -> "JobRequeue":
    """Return what to do when the run was stopped: with --requeue, one worker calls scontrol."""
    from allstep.errors import ConfigError
    from allstep.train.health.requeue import MAX_REQUEUES, JobRequeue

    if max_requeues is not None and not requeue:
        raise ConfigError(f"--max-requeues {max_requeues} needs --requeue; add it")
    most = MAX_REQUEUES if max_requeues is None else max_requeues
    return JobRequeue(os.environ, rank, most if requeue else None)


def _rehearse(
    request: "TrainRequest",
    overfit: int | None,
    dry_run: bool,
    workers: int | None,
    launcher: str | None,
) -> int:
    """Run the --overfit or --dry-run test and return its exit status."""
    from allstep.cli.rehearse import Rehearsal, rehearse
    from allstep.errors import ConfigError

    if overfit is not None and dry_run:
        raise ConfigError("--overfit and --dry-run are two tests; run one after the other")
    if request.resume:
        raise ConfigError(
            "--resume continues a run, --overfit and --dry-run precede one; give one of them"
        )
    return rehearse(
        Rehearsal(request.source, list(request.overrides), request.data, request.out, overfit),
        workers,
        launcher,
    )


def _list() -> None:
    """Print the name and the first docstring line of every recipe."""
    from allstep.train.config.recipes import RECIPES

    for name, recipe in RECIPES.items():
        print(f"{name:<20} {(recipe.__doc__ or '').partition(chr(10))[0]}")


def _request(
    arguments: list[str],
    overrides: list[str],
    out: Path | None,
    data: Path | None,
    resume: str | None,
    max_time: str | None,
) -> "TrainRequest":
    """Return the checked request of the command line.

    Raise ConfigError if its arguments contradict each other. `overrides` are KEY=VALUE texts that
    follow from flags; they take precedence over those in `arguments`.
    """
    from allstep.errors import ConfigError
    from allstep.train.config.read_config import default_source, split_arguments
    from allstep.train.run.train_request import TrainRequest

    sources, keys = split_arguments(arguments)
    overrides = [*keys, *overrides]
    if len(sources) > 1:
        raise ConfigError(
            f"expected one recipe or config file, found {', '.join(map(repr, sources))}; set"
            " config keys with KEY=VALUE"
        )
    if resume == _AUTO and out is None:
        raise ConfigError(
            "--resume auto resumes the run in --out DIR, but --out is missing; add it, or give"
            " --resume DIR"
        )
    if resume not in (None, _AUTO):
        assert resume is not None
        if out is not None and out != Path(resume):
            raise ConfigError(
                f"--resume {resume} and --out {out} name two folders; give one of them"
            )
        out = Path(resume)
        sources = sources or [str(out / "config.yaml")]
    source = sources[0] if sources else default_source(overrides)
    return TrainRequest(
        source, overrides, data, out, resume is not None, resume not in (None, _AUTO), max_time
    )


def _start(request: "TrainRequest", workers: int | None, elastic: ElasticOptions) -> int:
    """Check config and data, create the run folder, start the workers; return their exit status."""
    from allstep import faults
    from allstep.errors import DataError
    from allstep.launch import launch
    from allstep.train.config.num_workers import default_num_workers, no_result
    from allstep.train.config.trust import trust_override
    from allstep.train.folder.claim import (
        CONFIG,
        RECORD,
        Claimed,
        abandon,
        claim_folder,
        expect_run,
        has_ended,
    )
    from allstep.train.folder.run_lock import check_free
    from allstep.train.health.stop_request import STARTED, launched_now
    from allstep.train.run.prepare import check, prepare

    # Reading it raises for a --max-time that is wrong, before anything starts.
    _ = request.max_seconds
    if request.must_exist and request.out is not None:
        expect_run(request.out)
    try:
        with file_bars() as progress:
            prepared = prepare(request.source, request.overrides, request.data, progress)
        num_workers = workers or default_num_workers(prepared.config)
        policy = elastic.policy(num_workers, prepared.config)
        check(prepared, num_workers)
        most = num_workers if policy is None else policy.most_ranks
        faults.check(os.environ.get(faults.VARIABLE, ""), most)
    except DataError:
        # A run that has ended does not need its data.
        if request.resume and request.out is not None and has_ended(request.out):
            print_line(f"allstep: {Claimed(request.out).ended_message()}")
            return 0
        raise
    if prepared.note:
        print_notice(prepared.note)
    config = prepared.config.resolved(num_workers)
    claimed = claim_folder(config, request.out, request.resume)
    if claimed.has_ended:
        print_line(f"allstep: {claimed.ended_message()}")
        return 0
    # Rank 0 will lock the folder; report here, in one line, if another process holds it.
    check_free(claimed.path)
    command = run_module("allstep", "train", str(claimed.path / CONFIG), *claimed.overrides)
    command += [trust_override(config.model), "--out", str(claimed.path)]
    command += ["--resume", _AUTO] if claimed.resumes else []
    command += ["--max-time", request.max_time] if request.max_time is not None else []
    # --max-time counts from here, not from the first step.
    started = os.environ.get(STARTED) or launched_now()
    env = {**os.environ, "ALLSTEP_LAUNCHER": "allstep", STARTED: started}
    code = launch(command, num_workers, env=env, policy=policy)
    if code:
        abandon(claimed)
    elif not has_ended(claimed.path):
        abandon(claimed)
        raise no_result(f"the end of the run in {claimed.path / RECORD}")
    return code


def _work(request: "TrainRequest", launcher: str | None, requeue: "JobRequeue") -> int:
    """Train as a worker and return the exit status: RESUBMIT if the run was stopped and saved.

    `requeue` is called in a worker that saved alone, and left to the caller otherwise.
    """
    from allstep.cli.torch_import import import_torch

    import_torch(optimizers=True)
    from allstep.comm.join.membership import Dismissed
    from allstep.errors import PeerLost
    from allstep.launch import RESUBMIT
    from allstep.train.health.stop_request import ignore_stop_signals
    from allstep.train.run.progress import Paused
    from allstep.train.run.worker import work
    from allstep.world import World

    try:
        result = work(request, launcher)
    except PeerLost as lost:
        lost.args = (f"{lost}{_after_a_loss(World.detect(launcher).launcher)}",)
        raise
    except Dismissed as end:
        requeue.is_mine = end.saves
        with ignore_stop_signals():
            requeue()
        raise
    if not isinstance(result, Paused):
        return 0
    requeue.is_mine = result.is_saved_here
    return RESUBMIT


def _after_a_loss(launcher: str) -> str:
    """Return how to continue without a lost rank, for the end of its error.

    Empty under allstep's own launcher, which reports the loss, and where the options are the same.
    """
    if launcher == "allstep":
        return ""
    command = "allstep train --min-workers N"
    if launcher == "slurm":
        command = "allstep run --srun --min-np N allstep train ..."
    return (
        f"; {launcher} cannot replace a rank: --out DIR --resume auto continues from the newest"
        f" checkpoint, and `{command}` would have continued from memory"
    )
