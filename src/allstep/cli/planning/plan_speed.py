"""`allstep plan`: predict the speed of training on many workers."""

from pathlib import Path
from typing import Annotated

import typer

from allstep.cli.numbers import MOST, between
from allstep.cli.options import DataFolder, Trust
from allstep.cli.output_file import STDOUT, check_output, write_text
from allstep.cli.planning.plan_goal import GoalOptions, goal_of
from allstep.cli.planning.plan_recipe import (
    CalibrationOptions,
    ClusterOptions,
    PlanOptions,
    plan_of,
    split_recipe,
)
from allstep.console.escape import print_line
from allstep.errors import ConfigError

Arguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="RECIPE|CONFIG.yaml KEY=VALUE",
        help=(
            "Recipe or config file to plan, and config keys to change. With --published: a YAML"
            " file with series of your own runs, instead of the published ones."
        ),
    ),
]
Published = Annotated[
    bool,
    typer.Option(
        "--published",
        help="Predict published measurements and print the error of each prediction.",
    ),
]
Workers = Annotated[
    str | None,
    typer.Option(
        metavar="N,...",
        help="Numbers of workers, rising: 1,2,4,...,4096 (default: 1,2,4,...,64).",
    ),
]
PerHost = Annotated[
    int | None,
    typer.Option(
        callback=between("--per-host", 1, MOST),
        help="Workers of a host (default: those of this machine; with --alone 8).",
    ),
]
Link = Annotated[
    str | None,
    typer.Option(
        metavar="RATE/LATENCY",
        help="Link between hosts: 10Gbit/25us, 1GB/s, 100Mbit (default: the measured one).",
    ),
]
Inside = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|RATE",
        help="Connection inside a host: nvlink, pcie, pcie-k80 or a rate (default: measured).",
    ),
]
Alone = Annotated[
    str | None,
    typer.Option(
        metavar="SPEED@BATCH,...",
        help=(
            "Images/s of one worker on hardware that is not present, and the batch it was"
            " measured at: 195@32,219@64."
        ),
    ),
]
Batch = Annotated[
    int | None,
    typer.Option(min=1, help="Samples of a step over all workers (default: the recipe's)."),
]
BatchPerWorker = Annotated[
    int | None, typer.Option(min=1, help="Samples of a step per worker, instead of --batch.")
]
From = Annotated[
    Path | None,
    typer.Option("--from", metavar="FILE", help="Calibration to use, also of another machine."),
]
Like = Annotated[
    Path | None,
    typer.Option(metavar="RUN", help="Run folder to take speed, jitter and waiting from."),
]
Hosts = Annotated[
    str | None, typer.Option("-H", "--hosts", help="Calibrate on these hosts: h1:2,h2:2.")
]
Out = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="File of the calibration (default: plans/<recipe>.json)."),
]
Calibrate = Annotated[
    bool, typer.Option("--calibrate", help="Measure again, even if there is a calibration.")
]
WhatIf = Annotated[
    str | None,
    typer.Option(
        metavar="NAME=VALUE,...",
        help="One combination of changes: slow=3:1.5,link=2x,gradients=bfloat16,batch=2x.",
    ),
]
GoalOption = Annotated[
    float | None,
    typer.Option(min=0.0, max=1.0, help="Validation accuracy: also plan the time until it."),
]
StudyFolder = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help=(
            "With --goal: finished study of updates or batches (default: in studies/), or a run"
            " with noise_scale=true."
        ),
    ),
]
Price = Annotated[float | None, typer.Option(help="Price of an hour of a worker.")]
Deadline = Annotated[
    str | None, typer.Option(metavar="TIME", help="With --goal: time to meet: 90m, 2h, 1h30m.")
]
Budget = Annotated[
    float | None,
    typer.Option(help="With --goal: most worker-hours, or with --price most money."),
]
MostPerWorker = Annotated[
    int | None,
    typer.Option(min=1, help="With --goal: most samples that fit into a worker's memory."),
]
Json = Annotated[
    Path | None,
    typer.Option(
        "--json", metavar="FILE", help="Also write the figures as JSON; - is standard output."
    ),
]
Plot = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE.png", help="Also draw the figures.")
]


def plan(
    arguments: Arguments = None,
    published: Published = False,
    workers: Workers = None,
    per_host: PerHost = None,
    link: Link = None,
    inside: Inside = None,
    alone: Alone = None,
    batch: Batch = None,
    batch_per_worker: BatchPerWorker = None,
    calibration: From = None,
    like: Like = None,
    hosts: Hosts = None,
    out: Out = None,
    calibrate: Calibrate = False,
    what_if: WhatIf = None,
    goal: GoalOption = None,
    study: StudyFolder = None,
    price: Price = None,
    deadline: Deadline = None,
    budget: Budget = None,
    most_per_worker: MostPerWorker = None,
    json: Json = None,
    plot: Plot = None,
    data: DataFolder = None,
    trust: Trust = False,
) -> None:
    """Predict how fast a run is on many workers, from a calibration on this machine.

    The table states the error to expect, what limits the speed, and what one change would save.
    With --published it predicts published measurements instead.
    """
    check_output("--json", json, "JSON")
    check_output("--plot", plot, "a drawing")
    if published:
        _published(arguments or [], json)
        return
    from allstep.plan.answers.plan_table import as_json, as_text

    wanted = GoalOptions(goal, study, price, deadline, budget, most_per_worker)
    wanted.check()
    cluster = ClusterOptions(per_host, link, inside, alone)
    measured = CalibrationOptions(calibration, like, hosts, out, calibrate, data)
    named = arguments or []
    asked = PlanOptions(named, workers, batch, batch_per_worker, what_if, trust, cluster, measured)
    found = plan_of(asked)
    # Only rank 0 of a world prints.
    if found is None:
        return
    reached = goal_of(found, *split_recipe(asked), wanted)
    _print(as_text(found) + ("" if reached is None else f"\n{reached.text}"), json)
    write_text("--json", json, as_json(found, None if reached is None else reached.plain))
    if plot is not None:
        from allstep.study.calibration.plan_plot import draw

        draw(found, plot)


def _published(arguments: list[str], json: Path | None) -> None:
    """Print predicted against published; `arguments` may have a file with series."""
    from allstep.plan.published_report import as_json, as_text
    from allstep.plan.published_runs import published_runs
    from allstep.plan.published_table import points_of
    from allstep.plan.read_series import read_series

    if len(arguments) > 1:
        raise ConfigError(
            f"--published: expected one file with series, found {', '.join(map(repr, arguments))}"
        )
    runs = read_series(Path(arguments[0])) if arguments else published_runs()
    points = points_of(runs)
    _print(as_text(points), json)
    write_text("--json", json, as_json(points))


def _print(text: str, json: Path | None) -> None:
    if str(json) != STDOUT:
        for line in text.splitlines():
            print_line(line)
