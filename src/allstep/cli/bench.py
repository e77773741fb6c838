"""`allstep bench`: measure allstep beside its peers on this machine."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from allstep.cli.numbers import MOST, between
from allstep.cli.output_file import STDOUT, check_output, write_text
from allstep.console.progress_bar import step_bar

if TYPE_CHECKING:
    from allstep.bench import CommResult, Result
    from allstep.bench.data.result import DataResult
    from allstep.bench.step.result import StepResult

bench = typer.Typer(name="bench", help="Measure allstep beside its peers.", no_args_is_help=True)

Repetitions = Annotated[
    int,
    typer.Option("--repetitions", "-r", min=1, help="Turns that count, after one that does not."),
]
Json = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", help="Write the figures there; - is standard output."),
]
Plot = Annotated[Path | None, typer.Option("--plot", metavar="FILE.png", help="Draw them there.")]


@bench.callback()
def _root() -> None:
    """Measure allstep beside its peers."""


@bench.command()
def launch(repetitions: Repetitions = 5, json: Json = None, plot: Plot = None) -> None:
    """Start two ranks that add up one number: allstep run, torchrun, mpirun, and importing torch
    alone."""
    from allstep.bench.launch import contenders, measure_launch

    _check(json, plot)
    turns = (repetitions + 1) * sum(not contender.missing for contender in contenders())
    with step_bar(turns) as progress:
        result = measure_launch(repetitions, progress)
    _show(result, json, plot)


@bench.command()
def comm(
    ranks: Annotated[
        str, typer.Option("--ranks", metavar="N,...", help="Numbers of ranks.")
    ] = "2,4",
    sizes: Annotated[
        str,
        typer.Option(
            "--sizes", metavar="SIZE,...", help="Sizes of the tensor; a KB is 1,024 bytes."
        ),
    ] = "4KB,64KB,1MB,8MB,32MB,100MB,256MB",
    caches: Annotated[
        str,
        typer.Option(
            "--caches",
            metavar="STATE",
            help=(
                "Before each call: hot (nothing), written (rewrite the tensor), cold (rewrite, then"
                " empty the caches)."
            ),
        ),
    ] = "hot",
    repetitions: Repetitions = 9,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """Sum a tensor over the ranks of this host: allstep with shared and private tensors and by each
    algorithm, Gloo, Open MPI."""
    from allstep.bench.comm.measure import measure_comm
    from allstep.bench.comm.result import parse_caches, parse_ranks, parse_sizes

    _check(json, plot)
    numbers, nbytes, state = parse_ranks(ranks), parse_sizes(sizes), parse_caches(caches)
    turns = len(numbers) * len(nbytes) * (repetitions + 1)
    with step_bar(turns) as progress:
        result = measure_comm(numbers, nbytes, repetitions, progress, state)
    _show(result, json, plot)


@bench.command()
def step(
    model: Annotated[
        str, typer.Option("--model", help="alexnet, resnet18 or small-cnn.")
    ] = "alexnet",
    num_ranks: Annotated[
        int,
        typer.Option(
            "--np", "-n", callback=between("--np", 1, MOST), help="Ranks, each with one thread."
        ),
    ] = 2,
    batch: Annotated[
        int | None,
        typer.Option("--batch", min=1, help="Images of a rank at a step; 32, resnet18: 64."),
    ] = None,
    repetitions: Repetitions = 9,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """Train a model:

    DDP on Gloo and on allstep, DistributedOptimizer and share_weights beside independent copies.
    """
    from allstep.bench.step.measure import NUM_EXTRA, measure_step

    _check(json, plot)
    with step_bar(repetitions + NUM_EXTRA) as progress:
        result = measure_step(model, num_ranks, repetitions, batch, progress)
    _show(result, json, plot)


@bench.command()
def data(
    where: Annotated[
        list[str], typer.Argument(metavar="SRC...", help="Images: shards, a folder, idx files.")
    ],
    size: Annotated[
        int, typer.Option("--size", min=1, help="Pixels of a side that come out.")
    ] = 224,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Images of a batch.")] = 64,
    threads: Annotated[
        int | None,
        typer.Option(
            "--threads",
            "-j",
            callback=between("--threads", 1, MOST),
            help="Threads or processes of each; else one per core.",
        ),
    ] = None,
    max_samples: Annotated[
        int, typer.Option("--max-samples", min=1, help="Take so many images at most.")
    ] = 2000,
    repetitions: Repetitions = 5,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """Read, decode, crop, flip and collate images: allstep beside DataLoader, WebDataset, DALI
    and tf.data."""
    from allstep.bench.data.measure import NUM_EXTRA, measure_data

    _check(json, plot)
    with step_bar(repetitions + NUM_EXTRA) as progress:
        result = measure_data(where, size, batch, threads, repetitions, max_samples, progress)
    _show(result, json, plot)


def _check(json: Path | None, plot: Path | None) -> None:
    """What would go wrong after a minute of measuring goes wrong now."""
    check_output("--json", json, "JSON")
    check_output("--plot", plot, "a drawing")


def _show(
    result: "Result | CommResult | StepResult | DataResult", json: Path | None, plot: Path | None
) -> None:
    """The table on the terminal, out of the way of figures that go to standard output."""
    from rich.console import Console

    console = Console(stderr=str(json) == STDOUT, highlight=False)
    console.print(result.table())
    for line in result.absences():
        console.print(line, soft_wrap=True, markup=False)
    write_text("--json", json, f"{result.to_json()}\n")
    if plot is not None:
        result.plot(plot)
