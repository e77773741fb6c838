"""`allstep eval`: the score of a run's model, on the run's own data or on other data.

One process with all cores (or one GPU) does it, unless --workers asks for more, or a launcher
(allstep run, torchrun, mpirun, srun) has started them.
"""

import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from allstep.cli.numbers import MOST, between
from allstep.cli.output_file import check_output
from allstep.cli.predict import (
    Device,
    Json,
    RunFolder,
    Trust,
    WhichWeights,
    checked_which,
    tell,
    write_json,
)
from allstep.process.python import run_module

if TYPE_CHECKING:
    from allstep.train.folder.read import Evaluation
    from allstep.train.use.evaluate import Reevaluated

_DONE = "ALLSTEP_EVAL_DONE"
"""Variable with the path of the file that proves to the launching process that there is a score."""


def eval_(
    run: RunFolder,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE", help="Keys of the run's data, such as data.folder=DIR."
        ),
    ] = None,
    part: Annotated[
        str, typer.Option("--part", metavar="test|validation|train", help="Which part of the data.")
    ] = "test",
    data: Annotated[
        str | None,
        typer.Option(
            "--data", metavar="PLACE", help="Other data: a folder, file, pattern or URL; all of it."
        ),
    ] = None,
    which: WhichWeights = None,
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers",
            "-n",
            callback=between("--workers", 1, MOST),
            help="How many; else one process.",
        ),
    ] = None,
    device: Device = "auto",
    json: Json = None,
    trust: Trust = False,
    launcher: Annotated[
        str | None, typer.Option(help="Whose word counts about the world, instead of finding out.")
    ] = None,
) -> None:
    """Evaluate the model of a run, every sample once: loss, accuracy, top-5 accuracy."""
    from allstep.errors import ConfigError
    from allstep.train.config.num_workers import check_num_workers
    from allstep.train.folder.read import Evaluation, SplitName
    from allstep.world import NONE, World

    if part not in get_args(SplitName):
        raise ConfigError(f"--part: expected test, validation or train, found {part!r}")
    check_output("--json", json, "JSON")
    asked = Evaluation(run, part, checked_which(which), data, words or [], device, trust)  # type: ignore[arg-type]  # looked at above
    asked.config()
    world = World.detect(launcher)
    if world.launcher == NONE and workers is not None and workers > 1:
        raise typer.Exit(_start(workers))
    if world.launcher != NONE:
        check_num_workers(workers, world)
    from allstep.train.use.evaluate import work

    result = work(asked, launcher)
    if result is not None:
        tell(result.notes)
        _show(result, stderr=str(json) == "-")
        write_json(json, _as_json(asked, result))
        if world.launcher != NONE and (done := os.environ.get(_DONE)):
            Path(done).touch()


def _start(num_workers: int) -> int:
    """The same command on workers; their exit status.

    Rank 0 leaves a file once it has shown the score: a status of 0 alone proves nothing.
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
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from allstep.console.escape import escaped

    score = result.score
    table = Table(box=None, show_header=False, padding=(0, 3, 0, 0), pad_edge=False)
    rows = [
        ("data", result.where),
        ("weights", f"the {result.which} ones, after {result.samples:,} samples"),
        (
            "samples",
            f"{score.count:,}"
            + (f" ({result.num_bad} bad ones left out)" if result.num_bad else ""),
        ),
        ("loss", f"{score.loss:.4f}"),
        ("top-1 accuracy", f"{score.accuracy:.2%}"),
        ("top-5 accuracy", f"{score.top5:.2%}"),
    ]
    for name, value in rows:
        table.add_row(name, Text(escaped(value)))
    Console(stderr=stderr, highlight=False).print(table)


def _as_json(asked: "Evaluation", result: "Reevaluated") -> dict[str, object]:
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
