"""`allstep study`: many runs that together answer a question.

Give the same command again and it goes on where it was cut.
"""

import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from allstep.cli.numbers import MOST, between
from allstep.console.escape import escaped, print_notice

if TYPE_CHECKING:
    from collections.abc import Callable

    from allstep.study import Study, StudyFolder
    from allstep.study.findings import Findings
    from allstep.study.trial import Results
    from allstep.train import RunConfig

study = typer.Typer(
    name="study",
    help="Answer a question by many runs: how large a batch may be, and what it costs.",
    no_args_is_help=True,
)

Arguments = Annotated[
    list[str],
    typer.Argument(
        metavar="RECIPE|CONFIG.yaml KEY=VALUE",
        help="What to train, and what to change in every run.",
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        help=(
            "The study's folder, else studies/<recipe>-<study>; one that holds the same study"
            " goes on."
        )
    ),
]
Data = Annotated[
    Path | None, typer.Option(help="The folder with the data's files; else the usual places.")
]
Jobs = Annotated[
    int | None,
    typer.Option(
        "--jobs",
        "-j",
        callback=between("--jobs", 1, MOST),
        help="Runs at a time, each on one core; else one per core.",
    ),
]
Retry = Annotated[bool, typer.Option("--retry", help="Try those again that failed.")]
Trust = Annotated[
    bool, typer.Option("--trust", help="Execute the model code that a run folder's config names.")
]
Estimate = Annotated[
    bool,
    typer.Option(
        "--estimate",
        help="Begin, say how many runs there are and how long they will take, and stop.",
    ),
]


@study.command()
def batch(
    arguments: Arguments,
    batches: Annotated[str, typer.Option(help="Samples of an update.")] = "128,1024,4096,8192",
    remedies: Annotated[
        str, typer.Option(help="What is tried against the loss.")
    ] = "plain,linear,warmup,ghost,lars,lamb",
    remedy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME:KEY=VALUE,...",
            help=(
                "A remedy of your own, or another form of a known one, as in"
                " hot:lars,optimizer.lr=0.4."
            ),
        ),
    ] = None,
    seeds: Annotated[
        str, typer.Option(help="Seeds of each cell; exceptions as in 1,128=3,4096/lars=3.")
    ] = "1",
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Of every run; else the recipe's.")
    ] = None,
    goal: Annotated[
        float | None,
        typer.Option(
            min=0.0, max=1.0, help="A validation accuracy to which updates and seconds are counted."
        ),
    ] = None,
    out: Out = None,
    data: Data = None,
    jobs: Jobs = None,
    retry: Retry = False,
    estimate: Estimate = False,
    trust: Trust = False,
) -> None:
    """Accuracy by batch and remedy, after the same number of epochs."""
    from allstep.study import StudyFolder
    from allstep.study.batch.remedies import chosen
    from allstep.study.batch.study import SET, BatchGrid, parse_batches, parse_seeds
    from allstep.study.batch.table import BatchTable
    from allstep.study.train_trial import check_data, found, refuse_words

    recipe, words = _split(arguments, trust)
    refuse_words(words, SET)
    config, named = found(recipe, words, data)
    tried = chosen([name.strip() for name in remedies.split(",") if name.strip()], remedy or [])
    sizes = parse_batches(batches)
    asked = BatchGrid(
        recipe=recipe,
        words=(*named, *words),
        base_batch=config.optimizer.base_batch,
        epochs=epochs or config.epochs,
        goal=goal,
        remedies=tried,
        seeds=parse_seeds(seeds, sizes, list(tried)),
    )
    asked.study()
    check_data(config, sizes)
    folder = StudyFolder(out or _usual_folder(recipe, "batch"))
    asked = replace(asked, precision=_one_precision(config, folder))
    _answer(
        asked.study(), lambda results: BatchTable(asked, results), folder, jobs, retry, estimate
    )


@study.command()
def updates(
    arguments: Arguments,
    batches: Annotated[str, typer.Option(help="Samples of an update.")] = "32,128,512,2048",
    rates: Annotated[int, typer.Option(min=1, max=1000, help="Tried for each batch, at most.")] = 6,
    goal: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="The validation accuracy to reach.")
    ] = 0.85,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="After which a run gives up; else the recipe's.")
    ] = None,
    every: Annotated[
        float, typer.Option(help="Epochs between two evaluations: how finely updates are counted.")
    ] = 0.05,
    out: Out = None,
    data: Data = None,
    jobs: Jobs = None,
    retry: Retry = False,
    estimate: Estimate = False,
    trust: Trust = False,
) -> None:
    """Updates to a goal by batch, with the best of a few rates each, beside the published shape."""
    from allstep.study import StudyFolder
    from allstep.study.batch.study import parse_batches
    from allstep.study.train_trial import check_data, found, refuse_words
    from allstep.study.updates.study import SET, UpdatesSearch
    from allstep.study.updates.table import UpdatesTable

    recipe, words = _split(arguments, trust)
    refuse_words(words, SET)
    config, named = found(recipe, words, data)
    sizes = parse_batches(batches)
    asked = UpdatesSearch(
        recipe=recipe,
        words=(*named, *words),
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
    asked.study().wanted({})  # what is wrong with the first runs is said before there is a folder
    check_data(config, sizes)
    folder = StudyFolder(out or _usual_folder(recipe, "updates"))
    asked = replace(asked, precision=_one_precision(config, folder))
    _answer(
        asked.study(), lambda results: UpdatesTable(asked, results), folder, jobs, retry, estimate
    )


def _split(arguments: list[str], trust: bool) -> tuple[str, list[str]]:
    from allstep.errors import ConfigError
    from allstep.train.config.read import split_arguments

    sources, words = split_arguments(arguments)
    if len(sources) != 1:
        found = ", ".join(map(repr, sources)) or "none"
        raise ConfigError(
            f"expected one recipe or config file, found {found}; keys are set by key=value"
        )
    return sources[0], [*words, "trust=true"] if trust else words


def _usual_folder(recipe: str, question: str) -> Path:
    """Without the time in its name: the same command finds it again."""
    return Path("studies") / f"{Path(recipe).stem}-{question}"


def _one_precision(config: "RunConfig", folder: "StudyFolder") -> str | None:
    """The same for every run; a line states which, where the recipe leaves it to the machine."""
    from allstep.study.one_precision import one_precision

    precision = one_precision(config, folder)
    if precision is None:
        return None
    print_notice(str(precision))
    return precision.name


def _answer(
    asked: "Study",
    findings: "Callable[[Results], Findings]",
    folder: "StudyFolder",
    jobs: int | None,
    retry: bool,
    estimate: bool,
) -> None:
    """Runs the study and writes what it found, also when it was interrupted."""
    from allstep.launch import RESUBMIT
    from allstep.machine import allowed_cores
    from allstep.study import run
    from allstep.study.display import shown
    from allstep.study.findings import write_findings
    from allstep.study.results import has_diverged
    from allstep.study.runner import collect

    lanes, interrupted = jobs or allowed_cores(), False
    try:
        with shown(lanes) as callback:
            results = run(
                asked,
                folder,
                lanes,
                callback,
                lambda state: estimate and state.seconds_left is not None,
                retry,
            )
    except KeyboardInterrupt:
        interrupted, results = True, collect(asked, folder)
    if not estimate:
        command = shlex.join(["allstep", *sys.argv[1:]])
        page = write_findings(folder, findings(results), results, command)
        print(escaped(page, keep="\n"))
        _tell_failures(results)
    if interrupted:
        print(
            f"interrupted after {len(results)} runs have ended; the same command goes on",
            file=sys.stderr,
        )
        raise typer.Exit(130)
    if not estimate and (
        left := [trial.name for trial in asked.wanted(results) if trial.name not in results]
    ):
        print(
            f"told to stop and saved: {', '.join(left)}; the same command goes on", file=sys.stderr
        )
        raise typer.Exit(RESUBMIT)
    if any(
        outcome.status == "failed" and not has_diverged(outcome) for outcome in results.values()
    ):
        raise typer.Exit(1)


def _tell_failures(results: "Results") -> None:
    num_failed = sum(outcome.status == "failed" for outcome in results.values())
    if num_failed:
        print(
            f"{num_failed} of {len(results)} runs failed; --retry tries them again", file=sys.stderr
        )
