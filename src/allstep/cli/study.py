"""`allstep study`: many runs that together answer one question.

After an interruption, the same command resumes the study.
"""

from pathlib import Path
from typing import Annotated

import typer

from allstep.cli.numbers import MOST, between
from allstep.cli.options import DataFolder, Trust
from allstep.cli.study_run import Runs, begin, run

study = typer.Typer(
    name="study",
    help="Answer a question with many runs: how large a batch can be, how much data a goal needs.",
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

# data

Sizes = Annotated[
    str,
    typer.Option(
        help=(
            "Parts of the training split to train on: fractions or numbers of samples; ..."
            " continues the two before it."
        )
    ),
]
NumDataSeeds = Annotated[
    int, typer.Option("--seeds", min=1, max=1000, help="Number of runs of each size.")
]
DataEpochs = Annotated[
    int | None,
    typer.Option(
        min=1,
        help=(
            "Epochs of the whole split (default: the recipe's), which set the updates of every run."
        ),
    ),
]
DataGoal = Annotated[
    float | None,
    typer.Option(
        min=0.0, max=1.0, help="Validation accuracy; the study states how much data it needs."
    ),
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
    from allstep.study.batch.remedies import chosen
    from allstep.study.batch.study import SET, BatchGrid, parse_batches, parse_seeds
    from allstep.study.batch.table import BatchTable
    from allstep.study.train_trial import check_data

    begun = begin(arguments, trust, SET, data)
    config = begun.config
    tried = chosen([name.strip() for name in remedies.split(",") if name.strip()], remedy or [])
    sizes = parse_batches(batches)
    asked = BatchGrid(
        recipe=begun.recipe,
        overrides=begun.overrides,
        base_batch=config.optimizer.base_batch,
        epochs=epochs or config.epochs,
        goal=goal,
        remedies=tried,
        seeds=parse_seeds(seeds, sizes, list(tried)),
    )
    asked.study()
    check_data(config, sizes)
    run(asked, BatchTable, "batch", begun, Runs(out, jobs, retry, estimate))


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
    from allstep.study.batch.study import parse_batches
    from allstep.study.train_trial import check_data
    from allstep.study.updates.study import SET, UpdatesSearch
    from allstep.study.updates.table import UpdatesTable

    begun = begin(arguments, trust, SET, data)
    config = begun.config
    sizes = parse_batches(batches)
    asked = UpdatesSearch(
        recipe=begun.recipe,
        overrides=begun.overrides,
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
    run(asked, UpdatesTable, "updates", begun, Runs(out, jobs, retry, estimate))


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
    from allstep.study.sync.modes import parse_faults, parse_modes
    from allstep.study.sync.study import SET, SyncGrid
    from allstep.study.sync.table import SyncTable
    from allstep.study.train_trial import check_data

    begun = begin(arguments, trust, SET, data)
    config = begun.config
    batch = config.resolved(parties).batch
    asked = SyncGrid(
        recipe=begun.recipe,
        overrides=begun.overrides,
        modes=parse_modes(modes),
        faults=parse_faults(faults),
        parties=parties,
        seeds=seeds,
        epochs=epochs or config.epochs,
        batch=batch,
        goal=goal,
    )
    asked.study()
    check_data(config, [batch])
    run(asked, SyncTable, "sync", begun, Runs(out, jobs, retry, estimate))


@study.command("data")
def learning_curve(
    arguments: Arguments,
    sizes: Sizes = "1/64,1/32,...,1",
    seeds: NumDataSeeds = 1,
    epochs: DataEpochs = None,
    goal: DataGoal = None,
    out: Out = None,
    data: DataFolder = None,
    jobs: Jobs = None,
    retry: Retry = False,
    estimate: Estimate = False,
    trust: Trust = False,
) -> None:
    """Fit the error by the number of training samples, and predict it for more data.

    All sizes are trained for the same number of updates.
    """
    from allstep.study.data.sizes import parse_sizes
    from allstep.study.data.study import SET, DataGrid, check_growth
    from allstep.study.data.table import DataTable
    from allstep.study.train_trial import num_training_samples

    given = [] if epochs is None else [f"epochs={epochs}"]
    begun = begin([*arguments, *given], trust, SET, data)
    check_growth(begun.config)
    whole = num_training_samples(begun.config)
    asked = DataGrid(
        recipe=begun.recipe,
        overrides=begun.overrides,
        config=begun.config,
        whole=whole,
        sizes=tuple(parse_sizes(sizes, whole, begun.config.resolved(1).batch)),
        seeds=seeds,
        goal=goal,
    )
    asked.study()
    run(asked, DataTable, "data", begun, Runs(out, jobs, retry, estimate))
