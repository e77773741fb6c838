"""`allstep bench`: measure allstep and its peers on this machine."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from allstep.cli.numbers import MOST, between
from allstep.cli.output_file import STDOUT, check_output, write_text
from allstep.console.progress_bar import step_bar

if TYPE_CHECKING:
    from allstep.bench import CommResult, Result
    from allstep.bench.data.result import DataResult
    from allstep.bench.plan.result import PlanResult
    from allstep.bench.recover.result import RecoverResult
    from allstep.bench.step.result import StepResult
    from allstep.bench.sync.result import SyncResult

bench = typer.Typer(
    name="bench",
    help="Compare the speed of allstep with its peers on this machine.",
    no_args_is_help=True,
)

Repetitions = Annotated[
    int,
    typer.Option(
        "--repetitions", "-r", min=1, help="Number of measured repetitions, after one warm-up."
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


@bench.callback()
def _root() -> None:
    """Compare the speed of allstep with its peers on this machine."""


@bench.command()
def launch(repetitions: Repetitions = 5, json: Json = None, plot: Plot = None) -> None:
    """Measure the start of two ranks that sum one number.

    Compared are allstep run, torchrun, mpirun, and `import torch` alone.
    """
    from allstep.bench.launch import contenders, measure_launch

    _check(json, plot)
    turns = (repetitions + 1) * sum(not contender.missing for contender in contenders())
    with step_bar(turns) as progress:
        result = measure_launch(repetitions, progress)
    _show(result, json, plot)


@bench.command()
def comm(
    ranks: Annotated[
        str, typer.Option("--ranks", metavar="N,...", help="Numbers of ranks to measure.")
    ] = "2,4",
    sizes: Annotated[
        str,
        typer.Option(
            "--sizes", metavar="SIZE,...", help="Sizes of the tensor; 1 KB is 1,024 bytes."
        ),
    ] = "4KB,64KB,1MB,8MB,32MB,100MB,256MB",
    caches: Annotated[
        str,
        typer.Option(
            "--caches",
            metavar="STATE",
            help=(
                "State of the CPU caches before each call: hot (unchanged), written (the tensor is"
                " rewritten), cold (rewritten, then the caches are emptied)."
            ),
        ),
    ] = "hot",
    repetitions: Repetitions = 9,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """Measure an allreduce over ranks of this host.

    Compared are allstep with shared and private tensors and with each algorithm, Gloo and Open MPI.
    """
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
        str | None,
        typer.Option(
            "--model",
            help=(
                "Model: alexnet (default), resnet18 or small-cnn; with --framework cnn (default),"
                " resnet18 or dense."
            ),
        ),
    ] = None,
    framework: Annotated[
        str,
        typer.Option(
            "--framework",
            help="torch, keras-torch, keras-tensorflow, keras-jax, tensorflow or mxnet.",
        ),
    ] = "torch",
    num_ranks: Annotated[
        int,
        typer.Option(
            "--np",
            "-n",
            callback=between("--np", 1, MOST),
            help="Number of ranks, with one thread each.",
        ),
    ] = 2,
    batch: Annotated[
        int | None,
        typer.Option(
            "--batch", min=1, help="Images per rank and step (default: 32; resnet18: 64)."
        ),
    ] = None,
    repetitions: Repetitions = 9,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """Measure training steps of a model on several ranks.

    Compared are DDP on Gloo and on allstep, DistributedOptimizer, share_weights, and independent
    copies without communication; with --framework, the front-end of that framework, its bridge
    alone and the framework's own way.
    """
    from allstep.bench.step.measure import NUM_EXTRA

    _check(json, plot)
    with step_bar(repetitions + NUM_EXTRA) as progress:
        measure = _step_measure(framework)
        result = measure(model, num_ranks, repetitions, batch, progress)
    _show(result, json, plot)


def _step_measure(framework: str) -> Callable[..., "StepResult"]:
    """Return the function that measures steps of a framework; its model may be None."""
    if framework == "torch":
        from allstep.bench.step.measure import measure_step

        return lambda model, *rest: measure_step(model or "alexnet", *rest)
    from allstep.bench.step.frameworks.measure import measure_framework_step

    return lambda model, *rest: measure_framework_step(framework, model or "cnn", *rest)


@bench.command()
def recover(
    parts: Annotated[
        str,
        typer.Option(
            "--part",
            metavar="PART,...",
            help=(
                "What to measure: kill (a worker is killed, next to torchrun, and to torchft if"
                " ALLSTEP_TORCHFT_PYTHON names a Python that has it and allstep), form (the next"
                " world alone), join (the others' pause when a worker joins), quiet (a step when no"
                " worker is lost)."
            ),
        ),
    ] = "kill,form,join,quiet",
    repetitions: Repetitions = 9,
    json: Json = None,
) -> None:
    """Measure how long a run pauses when a worker is killed and when one joins.

    Compared are an elastic run of allstep and torchrun with --max-restarts, a pause and one copy of
    the same bytes, and an elastic run that loses no worker and the same run that is not elastic.
    """
    from allstep.bench.recover.measure import measure_recover, num_turns, parse_parts

    _check(json, None)
    chosen = parse_parts(parts)
    with step_bar(num_turns(repetitions, chosen)) as progress:
        result = measure_recover(repetitions, progress, chosen)
    _print(result, json)


@bench.command()
def sync(
    sizes: Annotated[
        str,
        typer.Option("--sizes", metavar="SIZE,...", help="Sizes of the key; 1 KB is 1,024 bytes."),
    ] = "4KB,64KB,1MB,8MB,32MB,128MB",
    workers: Annotated[
        int,
        typer.Option(
            "--workers", callback=between("--workers", 1, MOST), help="Workers that push."
        ),
    ] = 2,
    mxnet: Annotated[
        Path | None,
        typer.Option(
            "--mxnet",
            metavar="PYTHON",
            help="Python of an environment with MXNet 1.9.1 and pyzmq.",
        ),
    ] = None,
    repetitions: Repetitions = 9,
    json: Json = None,
) -> None:
    """Measure a push and a pull of one key by workers of this host.

    Compared are allstep.kvstore, Gloo with a server, MXNet's dist_async and ZeroMQ with a server.
    """
    from allstep.bench.comm.result import parse_sizes
    from allstep.bench.sync.measure import check_python, measure_sync

    _check(json, None)
    check_python(mxnet)
    nbytes = parse_sizes(sizes)
    with step_bar(len(nbytes) * (repetitions + 1)) as progress:
        result = measure_sync(nbytes, workers, repetitions, mxnet, progress)
    _print(result, json)


@bench.command()
def plan(
    workers: Annotated[
        int,
        typer.Option(
            "--workers",
            callback=between("--workers", 2, MOST),
            help="Largest number of workers to measure; 16 adds a configuration without target.",
        ),
    ] = 8,
    steps: Annotated[
        int, typer.Option("--steps", min=1, help="Measured steps of each configuration.")
    ] = 8,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """Compare predicted steps with measured ones, on several hosts made on this machine.

    Layers sleep instead of computing, so that 8 workers fit on 2 cores; gradients, buckets and
    network are real. Hosts are network namespaces, which only root can make.
    """
    from allstep.bench.plan.measure import measure_plan, num_turns

    _check(json, plot)
    with step_bar(num_turns(workers)) as progress:
        result = measure_plan(workers, steps, progress)
    _show(result, json, plot)


@bench.command()
def data(
    where: Annotated[
        list[str], typer.Argument(metavar="SRC...", help="Images: shards, a folder or idx files.")
    ],
    size: Annotated[
        int, typer.Option("--size", min=1, help="Side of the cropped images in pixels.")
    ] = 224,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Images per batch.")] = 64,
    threads: Annotated[
        int | None,
        typer.Option(
            "--threads",
            "-j",
            callback=between("--threads", 1, MOST),
            help="Threads or processes of each loader (default: one per core).",
        ),
    ] = None,
    max_samples: Annotated[
        int, typer.Option("--max-samples", min=1, help="Maximum number of images to read.")
    ] = 2000,
    repetitions: Repetitions = 5,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """Measure loaders that read, decode, crop, flip and collate images.

    Compared are allstep, DataLoader, WebDataset, DALI and tf.data.
    """
    from allstep.bench.data.measure import NUM_EXTRA, measure_data

    _check(json, plot)
    with step_bar(repetitions + NUM_EXTRA) as progress:
        result = measure_data(where, size, batch, threads, repetitions, max_samples, progress)
    _show(result, json, plot)


def _check(json: Path | None, plot: Path | None) -> None:
    """Raise ConfigError before the measurement if an output file cannot be written."""
    check_output("--json", json, "JSON")
    check_output("--plot", plot, "a drawing")


def _show(
    result: "Result | CommResult | StepResult | DataResult | PlanResult",
    json: Path | None,
    plot: Path | None,
) -> None:
    """Print the table and write the files; the table goes to stderr if JSON goes to stdout."""
    _print(result, json)
    if plot is not None:
        result.plot(plot)


def _print(
    result: (
        "Result | CommResult | StepResult | DataResult | PlanResult | RecoverResult | SyncResult"
    ),
    json: Path | None,
) -> None:
    from rich.console import Console

    console = Console(stderr=str(json) == STDOUT, highlight=False)
    console.print(result.table())
    for line in result.absences():
        console.print(line, soft_wrap=True, markup=False)
    write_text("--json", json, f"{result.to_json()}\n")
