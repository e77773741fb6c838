"""`allstep study`: many runs that together answer one question.

After an interruption, the same command resumes the study.
"""

import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from allstep.cli.numbers import MOST, between
from allstep.cli.options import DataFolder, Trust
from allstep.console.escape import escaped, print_notice

if TYPE_CHECKING:
    from collections.abc import Callable

    from allstep.study import Study, StudyFolder
    from allstep.study.findings import Findings
    from allstep.study.trial import Results
    from allstep.train import RunConfig

study = typer.Typer(
    name="study",
    help="Answer a question with many runs: how large a batch can be, which mode of sync pays.",
    no_args_is_help=True,
)

Arguments = Annotated[
    list[str],
    typer.Argument(
        metavar="RECIPE|CONFIG.yaml KEY=VALUE",
        help="Recipe or config file to train, and config keys to change in every run.",
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        help=(
            "Study folder (default: studies/<recipe>-<study>); if it has the same study, that study"
            " is resumed."
        )
    ),
]
Jobs = Annotated[
    int | None,
    typer.Option(
        "--jobs",
        "-j",
        callback=between("--jobs", 1, MOST),
        help="Number of simultaneous runs (default: as many as have a core for each worker).",
    ),
]
Retry = Annotated[bool, typer.Option("--retry", help="Repeat the runs that failed.")]
Estimate = Annotated[
    bool,
    typer.Option(
        "--estimate",
        help="Start, print the number of runs and the expected time, and stop.",
    ),
]
Batches = Annotated[
    str, typer.Option(help="Batches to compare: samples per update, separated by commas.")
]

# batch

Remedies = Annotated[
    str, typer.Option(help="Remedies to compare against the accuracy loss of large batches.")
]
Remedy = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME:KEY=VALUE,...",
        help=(
            "Further remedy: config keys of your own, or a known remedy with changed keys, such as"
            " hot:lars,optimizer.lr=0.4."
        ),
    ),
]
Seeds = Annotated[
    str,
    typer.Option(
        help=(
            "Number of seeds per cell of the table, and exceptions by batch or batch/remedy:"
            " 1,128=3,4096/lars=3."
        )
    ),
]
Epochs = Annotated[
    int | None, typer.Option(min=1, help="Epochs of every run (default: the recipe's).")
]
BatchGoal = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        max=1.0,
        help="Validation accuracy; the table shows updates and seconds until a run reaches it.",
    ),
]

# updates

NumRates = Annotated[
    int, typer.Option(min=1, max=1000, help="Maximum number of learning rates to try per batch.")
]
UpdatesGoal = Annotated[float, typer.Option(min=0.0, max=1.0, help="Validation accuracy to reach.")]
MaxEpochs = Annotated[
    int | None,
    typer.Option(
        min=1, help="Epochs after which a run ends without the goal (default: the recipe's)."
    ),
]
Every = Annotated[
    float,
    typer.Option(help="Epochs between two evaluations: the resolution of the number of updates."),
]

# sync

Modes = Annotated[
    str,
    typer.Option(
        help=(
            "Values of sync to compare, each with further config keys after +:"
            " async+sync.correct=lr. allreduce adds shares=speed."
        )
    ),
]
Parties = Annotated[
    int, typer.Option(callback=between("--parties", 1, MOST), help="Workers of each run.")
]
FaultList = Annotated[
    str,
    typer.Option(
        "--faults", help="Faults to compare, as for allstep train --fault; none: without."
    ),
]
NumSeeds = Annotated[
    int, typer.Option("--seeds", min=1, max=1000, help="Number of seeds of each mode and fault.")
]


@study.command()
def batch(
    arguments: Arguments,
    batches: Batches = "128,1024,4096,8192",
    remedies: Remedies = "plain,linear,warmup,ghost,lars,lamb",
    remedy: Remedy = None,
    seeds: Seeds = "1",
    epochs: Epochs = None,
    goal: BatchGoal = None,
    out: Out = None,
    data: DataFolder = None,
    jobs: Jobs = None,
    retry: Retry = False,
    estimate: Estimate = False,
    trust: Trust = False,
) -> None:
    """Compare the accuracy of batches and remedies after the same number of epochs."""
    from allstep.study import StudyFolder
    from allstep.study.batch.remedies import chosen
    from allstep.study.batch.study import SET, BatchGrid, parse_batches, parse_seeds
    from allstep.study.batch.table import BatchTable
    from allstep.study.train_trial import check_data, found, refuse_overrides

    recipe, overrides = split_words(arguments, trust)
    refuse_overrides(overrides, SET)
    config, named = found(recipe, overrides, data)
    tried = chosen([name.strip() for name in remedies.split(",") if name.strip()], remedy or [])
    sizes = parse_batches(batches)
    asked = BatchGrid(
        recipe=recipe,
        overrides=(*named, *overrides),
        base_batch=config.optimizer.base_batch,
        epochs=epochs or config.epochs,
        goal=goal,
        remedies=tried,
        seeds=parse_seeds(seeds, sizes, list(tried)),
    )
    asked.study()
    check_data(config, sizes)
    folder = StudyFolder(out or default_folder(recipe, "batch"))
    asked = replace(asked, precision=shared_precision(config, folder))
    answer(asked.study(), lambda results: BatchTable(asked, results), folder, jobs, retry, estimate)


@study.command()
def updates(
    arguments: Arguments,
    batches: Batches = "32,128,512,2048",
    rates: NumRates = 6,
    goal: UpdatesGoal = 0.85,
    epochs: MaxEpochs = None,
    every: Every = 0.05,
    out: Out = None,
    data: DataFolder = None,
    jobs: Jobs = None,
    retry: Retry = False,
    estimate: Estimate = False,
    trust: Trust = False,
) -> None:
    """Count the updates to a goal by batch, with the best of several learning rates each.

    The table compares the counts with the published shape of that curve.
    """
    from allstep.study import StudyFolder
    from allstep.study.batch.study import parse_batches
    from allstep.study.train_trial import check_data, found, refuse_overrides
    from allstep.study.updates.study import SET, UpdatesSearch
    from allstep.study.updates.table import UpdatesTable

    recipe, overrides = split_words(arguments, trust)
    refuse_overrides(overrides, SET)
    config, named = found(recipe, overrides, data)
    sizes = parse_batches(batches)
    asked = UpdatesSearch(
        recipe=recipe,
        overrides=(*named, *overrides),
        lr=config.optimizer.lr,
        base_batch=config.optimizer.base_batch,
        batches=tuple(sizes),
        num_rates=rates,
        goal=goal,
        epochs=epochs or config.epochs,
        every=every,
        seed=config.seed,
        data=config.data.name,
    )
    # Report errors in the first runs before a study folder exists.
    asked.study().wanted({})
    check_data(config, sizes)
    folder = StudyFolder(out or default_folder(recipe, "updates"))
    asked = replace(asked, precision=shared_precision(config, folder))
    answer(
        asked.study(), lambda results: UpdatesTable(asked, results), folder, jobs, retry, estimate
    )


@study.command()
def sync(
    arguments: Arguments,
    modes: Modes = "allreduce,server,async,stale:2,local:8,diloco:32",
    parties: Parties = 2,
    faults: FaultList = "none",
    seeds: NumSeeds = 1,
    epochs: Epochs = None,
    goal: BatchGoal = None,
    out: Out = None,
    data: DataFolder = None,
    jobs: Jobs = None,
    retry: Retry = False,
    estimate: Estimate = False,
    trust: Trust = False,
) -> None:
    """Compare accuracy, throughput and time to a goal of modes between sync and async."""
    from allstep.study import StudyFolder
    from allstep.study.sync.modes import parse_faults, parse_modes
    from allstep.study.sync.study import SET, SyncGrid
    from allstep.study.sync.table import SyncTable
    from allstep.study.train_trial import check_data, found, refuse_overrides

    recipe, overrides = split_words(arguments, trust)
    refuse_overrides(overrides, SET)
    tried, faulty = parse_modes(modes), parse_faults(faults)
    config, named = found(recipe, overrides, data)
    batch = config.resolved(parties).batch
    asked = SyncGrid(
        recipe=recipe,
        overrides=(*named, *overrides),
        modes=tried,
        faults=faulty,
        parties=parties,
        seeds=seeds,
        epochs=epochs or config.epochs,
        batch=batch,
        goal=goal,
    )
    asked.study()
    check_data(config, [batch])
    folder = StudyFolder(out or default_folder(recipe, "sync"))
    asked = replace(asked, precision=shared_precision(config, folder))
    answer(asked.study(), lambda results: SyncTable(asked, results), folder, jobs, retry, estimate)


def split_words(arguments: list[str], trust: bool) -> tuple[str, list[str]]:
    """Return the recipe or config file, and the KEY=VALUE overrides with trust=true for --trust."""
    from allstep.errors import ConfigError
    from allstep.train.config.read_config import split_arguments

    sources, overrides = split_arguments(arguments)
    if len(sources) != 1:
        found = ", ".join(map(repr, sources)) or "none"
        raise ConfigError(
            f"expected one recipe or config file, found {found}; set config keys with KEY=VALUE"
        )
    return sources[0], [*overrides, "trust=true"] if trust else overrides


def default_folder(recipe: str, question: str) -> Path:
    """Return the default study folder. Its name has no time, so the same command finds it again."""
    return Path("studies") / f"{Path(recipe).stem}-{question}"


def shared_precision(config: "RunConfig", folder: "StudyFolder") -> str | None:
    """Return the precision for every run, or None if the recipe sets one.

    Print a line with the precision that was chosen for this machine.
    """
    from allstep.study.one_precision import one_precision

    precision = one_precision(config, folder)
    if precision is None:
        return None
    print_notice(str(precision))
    return precision.name


def answer(
    asked: "Study",
    findings: "Callable[[Results], Findings]",
    folder: "StudyFolder",
    jobs: int | None,
    retry: bool,
    estimate: bool,
) -> None:
    """Run the study, then write and print its findings, also after an interruption.

    Exit with 130 after Ctrl-C, with RESUBMIT if runs stopped early and saved, with 1 if
    a run failed without having diverged. `jobs` is the number of simultaneous runs (default: as
    many as have a core for each worker). With `estimate`, stop once the remaining time is known.
    """
    from allstep.launch import RESUBMIT
    from allstep.machine import allowed_cores
    from allstep.study import run
    from allstep.study.display import shown
    from allstep.study.findings import write_findings
    from allstep.study.results import has_diverged
    from allstep.study.runner import collect

    needed = max((trial.cores for trial in asked.wanted({})), default=1)
    lanes, interrupted = jobs or max(1, allowed_cores() // needed), False
    try:
        with shown(lanes) as callback:
            results = run(
                asked,
                folder,
                lanes,
                callback,
                lambda state: estimate and state.seconds_left is not None,
                retry,
                # A number of simultaneous runs that the user gives counts.
                cores=None if jobs else allowed_cores(),
            )
    except KeyboardInterrupt:
        interrupted, results = True, collect(asked, folder)
    if not estimate:
        command = shlex.join(["allstep", *sys.argv[1:]])
        page = write_findings(folder, findings(results), results, command)
        print(escaped(page, keep="\n"))
        _report_failures(results)
    if interrupted:
        print(
            f"interrupted after {len(results)} runs have ended; the same command resumes",
            file=sys.stderr,
        )
        raise typer.Exit(130)
    if not estimate and (
        left := [trial.name for trial in asked.wanted(results) if trial.name not in results]
    ):
        print(
            f"stopped early and saved: {', '.join(left)}; the same command resumes",
            file=sys.stderr,
        )
        raise typer.Exit(RESUBMIT)
    if any(
        outcome.status == "failed" and not has_diverged(outcome) for outcome in results.values()
    ):
        raise typer.Exit(1)


def _report_failures(results: "Results") -> None:
    """Print the number of failed runs to standard error, if there are any."""
    num_failed = sum(outcome.status == "failed" for outcome in results.values())
    if num_failed:
        print(f"{num_failed} of {len(results)} runs failed; --retry repeats them", file=sys.stderr)
