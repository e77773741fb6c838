"""`allstep eval`: evaluate the model of a run, on the run's own data or on other data.

One process with all cores (or one GPU) evaluates, unless --workers requests more or a launcher
(allstep run, torchrun, mpirun, srun) has started several.
"""

import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast, get_args

import typer

from allstep.cli.numbers import MOST, between
from allstep.cli.options import Launcher
from allstep.cli.output_file import check_output
from allstep.cli.saved_run.predict import (
    Device,
    Json,
    RunFolder,
    Trust,
    WhichWeights,
    checked_which,
    print_notes,
    write_json,
)
from allstep.process.python import run_module

if TYPE_CHECKING:
    from allstep.train.folder.existing_run import Evaluation
    from allstep.train.use.evaluate import Reevaluated

_DONE = "ALLSTEP_EVAL_DONE"
"""Environment variable: path of the file that rank 0 creates once it has printed the score."""

Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Config keys of the run's data to change, such as data.folder=DIR.",
    ),
]
Split = Annotated[
    str, typer.Option("--part", metavar="test|validation|train", help="Split to evaluate.")
]
OtherData = Annotated[
    str | None,
    typer.Option(
        "--data",
        metavar="PLACE",
        help="Evaluate all samples of other data instead: a folder, file, pattern or URL.",
    ),
]
NumSamples = Annotated[
    int | None,
    typer.Option(
        "--samples",
        min=1,
        metavar="N",
        help=(
            "Evaluate a fixed subset of N samples, the same one as `allstep landscape` (default:"
            " all)."
        ),
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(
        "--workers",
        "-n",
        callback=between("--workers", 1, MOST),
        help="Number of workers (default: one process).",
    ),
]


def eval_(
    run: RunFolder,
    overrides: Overrides = None,
    split: Split = "test",
    data: OtherData = None,
    samples: NumSamples = None,
    which: WhichWeights = None,
    workers: Workers = None,
    device: Device = "auto",
    json: Json = None,
    trust: Trust = False,
    launcher: Launcher = None,
) -> None:
    """Evaluate the model of a run, each sample once: loss, accuracy, top-5 accuracy."""
    from allstep.cli.torch_import import import_torch
    from allstep.errors import ConfigError
    from allstep.train.config.num_workers import check_num_workers
    from allstep.train.folder.existing_run import Evaluation, SplitName
    from allstep.world import NONE, World

    if split not in get_args(SplitName):
        raise ConfigError(f"--part: expected test, validation or train, found {split!r}")
    check_output("--json", json, "JSON")
    name, weights = cast("SplitName", split), checked_which(which)
    asked = Evaluation(run, name, weights, data, overrides or [], device, trust, samples)
    asked.config()
    world = World.detect(launcher)
    if world.launcher == NONE and workers is not None and workers > 1:
        raise typer.Exit(_start(workers))
    if world.launcher != NONE:
        check_num_workers(workers, world)
    import_torch(optimizers=False)
    from allstep.train.use.evaluate import work

    result = work(asked, launcher)
    if result is not None:
        print_notes(result.notes)
        _show(result, stderr=str(json) == "-")
        write_json(json, _as_json(asked, result))
        if world.launcher != NONE and (done := os.environ.get(_DONE)):
            Path(done).touch()


def _start(num_workers: int) -> int:
    """Start the same command on `num_workers` workers and return their exit status.

    Rank 0 creates a file once it has printed the score. Raise if that file is missing after exit
    status 0: the status alone does not prove that there is a score.
    """
    from allstep.launch import launch
    from allstep.train.config.num_workers import no_result

    command = run_module("allstep", *sys.argv[1:])
    with tempfile.TemporaryDirectory(prefix="allstep-eval-") as folder:
        done = Path(folder) / "done"
        env = {**os.environ, "ALLSTEP_LAUNCHER": "allstep", _DONE: str(done)}
        code = launch(command, num_workers, env=env)
        if not code and not done.exists():
            raise no_result("a score")
    return code


def _show(result: "Reevaluated", *, stderr: bool) -> None:
    """Print the score as a table."""
    from allstep.console.rich_table import name_value_table, print_table

    score = result.score
    left_out = f" ({result.num_bad} bad ones left out)" if result.num_bad else ""
    rows = [
        ("data", result.where),
        ("weights", f"the {result.which} ones, after {result.samples:,} samples"),
        ("samples", f"{score.count:,}{left_out}"),
        ("loss", f"{score.loss:.4f}"),
        ("top-1 accuracy", f"{score.accuracy:.2%}"),
        ("top-5 accuracy", f"{score.top5:.2%}"),
    ]
    print_table(name_value_table(rows), stderr=stderr)


def _as_json(asked: "Evaluation", result: "Reevaluated") -> dict[str, object]:
    """Return the score as plain values for --json."""
    score = result.score
    return {
        "run": str(asked.folder),
        "data": result.where,
        "weights": result.which,
        "trained_on": result.samples,
        "count": score.count,
        "loss": score.loss,
        "accuracy": score.accuracy,
        "top5": score.top5,
        "num_bad": result.num_bad,
    }
