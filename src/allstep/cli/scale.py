"""`allstep scale`: measure a recipe with several numbers of workers, and explain the loss.

After an interruption, the same command resumes the study.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from allstep.cli.options import DataFolder, Ssh, Trust
from allstep.cli.output_file import check_output, write_text
from allstep.cli.study import Arguments, Estimate, Out, Retry
from allstep.cli.study_run import Runs, begin, run

if TYPE_CHECKING:
    from allstep.study.scale.table import ScaleTable
    from allstep.study.trial import Results

Workers = Annotated[
    str, typer.Option("--workers", metavar="N,...", help="Numbers of workers, in rising order.")
]
Hosts = Annotated[
    str | None,
    typer.Option("-H", "--hosts", help="Hosts and their slots, filled in this order: h1:2,h2:2."),
]
PerWorker = Annotated[
    int | None,
    typer.Option(
        "--batch-per-worker",
        min=1,
        help="Samples of each worker (weak scaling); default: the recipe's batch for all together.",
    ),
]
Rounds = Annotated[
    int,
    typer.Option(
        "--rounds", min=1, max=1000, help="Rounds; each runs every number of workers once."
    ),
]
Seconds = Annotated[
    float, typer.Option("--seconds", min=0.1, help="Seconds of steps to measure in each run.")
]
Full = Annotated[
    bool, typer.Option("--full", help="Train every run to its end, and compare test accuracies.")
]
Link = Annotated[
    str | None,
    typer.Option(
        "--link",
        help="Link between hosts, such as 10Gbit/25us, for predictions before it was used.",
    ),
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


def scale(
    arguments: Arguments,
    workers: Workers = "1,2",
    hosts: Hosts = None,
    batch_per_worker: PerWorker = None,
    rounds: Rounds = 3,
    seconds: Seconds = 10.0,
    full: Full = False,
    link: Link = None,
    out: Out = None,
    data: DataFolder = None,
    retry: Retry = False,
    estimate: Estimate = False,
    json: Json = None,
    plot: Plot = None,
    ssh: Ssh = "ssh",
    trust: Trust = False,
) -> None:
    """Measure the speed with several numbers of workers, and where the rest of it is lost.

    Each number runs once in each round, alone on the machine. Each row is compared with what the
    planner predicts from the rows before it.
    """
    from allstep.machine import allowed_cores
    from allstep.plan.transports import read_link
    from allstep.study.scale.study import SET, ScaleRounds, parse_workers
    from allstep.study.scale.table import ScaleTable
    from allstep.study.train_trial import check_data

    check_output("--json", json, "JSON")
    check_output("--plot", plot, "a drawing")
    numbers = parse_workers(workers)
    named_link = None if link is None else read_link(link)
    own = {**SET, **({"batch": "give --batch-per-worker alone"} if batch_per_worker else {})}
    begun = begin(arguments, trust, own, data)
    asked = ScaleRounds(
        recipe=begun.recipe,
        overrides=tuple(each for each in begun.overrides if not each.startswith("batch=")),
        workers=numbers,
        rounds=rounds,
        batch=batch_per_worker or begun.config.resolved(1).batch,
        cores=allowed_cores(),
        per_worker=batch_per_worker is not None,
        hosts=hosts,
        ssh=ssh,
        link=named_link,
        full=full,
        seconds=seconds,
    )
    asked.check()
    asked.study()
    num_train = check_data(begun.config, [asked.batch_of(numbers[-1])])

    def findings(asked: ScaleRounds, results: "Results") -> ScaleTable:
        table = ScaleTable(asked, results, num_train)
        write_text("--json", json, _document(table))
        if plot is not None:
            table.draw(plot)
        return table

    run(asked, findings, "scale", begun, Runs(out, 1, retry, estimate))


def _document(table: "ScaleTable") -> str:
    import json

    return json.dumps(table.as_json(), indent=2) + "\n"
