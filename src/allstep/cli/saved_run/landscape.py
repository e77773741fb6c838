"""`allstep landscape`: the loss around the weights of a run, and on the line to a second one.

The points are distributed over workers, one per core or GPU, that run this same command. After an
interruption, the same command resumes.
"""

import os
import shlex
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast, get_args

import typer

from allstep.cli.numbers import MOST, between
from allstep.cli.options import Launcher
from allstep.cli.output_file import STDOUT, check_output
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
from allstep.console.escape import print_line, print_notice
from allstep.process.python import run_module

if TYPE_CHECKING:
    from allstep.study.landscape.asked import Asked, Expected, Landscape

_DONE = "ALLSTEP_LANDSCAPE_DONE"
"""Environment variable: path of the file that rank 0 creates once it has printed the result."""

SecondRun = Annotated[
    Path | None,
    typer.Argument(
        metavar="[RUN2]", help="Second run of the same model: the line to it, and its flatness."
    ),
]
Points = Annotated[
    str,
    typer.Option(
        metavar="NxM|N", help="Points along two random directions, or along one, from -1 to 1."
    ),
]
NumSamples = Annotated[
    int,
    typer.Option("--samples", min=1, metavar="N", help="Size of the fixed subset of the split."),
]
Split = Annotated[
    str, typer.Option("--part", metavar="train|validation|test", help="Split of the samples.")
]
Seed = Annotated[int, typer.Option(min=0, max=2**31 - 1, help="Seed of the random directions.")]
Limit = Annotated[
    str, typer.Option(metavar="TIME", help="Refuse what is expected to take longer: 30m, 2h.")
]
Workers = Annotated[
    int | None,
    typer.Option(
        "--workers",
        "-n",
        callback=between("--workers", 1, MOST),
        help="Number of workers of one thread (default: one per GPU, or per core, up to 8).",
    ),
]
Plot = Annotated[
    Path | None,
    typer.Option(
        "--plot",
        metavar="FILE.png",
        help="Also draw it; with RUN2, both runs if RUN2 has a landscape, too.",
    ),
]


def landscape(
    run: RunFolder,
    run2: SecondRun = None,
    points: Points = "25x25",
    samples: NumSamples = 2000,
    part: Split = "train",
    which: WhichWeights = None,
    seed: Seed = 0,
    limit: Limit = "1h",
    workers: Workers = None,
    device: Device = "auto",
    json: Json = None,
    plot: Plot = None,
    trust: Trust = False,
    launcher: Launcher = None,
) -> None:
    """Compute the loss around the weights of a run, and how flat it is there.

    The result is stored in RUN/landscape, and `allstep report RUN` draws it.
    """
    from allstep.machine import allowed_cores
    from allstep.train.config.num_workers import (
        check_num_workers,
        choose_num_workers,
        count_gpus,
    )
    from allstep.world import NONE, World

    check_output("--json", json, "JSON")
    check_output("--plot", plot, "a drawing")
    asked = _asked(run, run2, points, samples, part, which, seed, limit, device, trust)
    world = World.detect(launcher)
    if world.launcher == NONE:
        count = workers or choose_num_workers(count_gpus(), allowed_cores(), None)
        if count > 1:
            raise typer.Exit(_start(count))
    else:
        check_num_workers(workers, world)
    outcome = _work(asked, launcher)
    if outcome is not None:
        _show(asked, outcome, stderr=str(json) == STDOUT)
        write_json(json, [each.plain() for each in (outcome.around, outcome.line) if each])
        if plot is not None:
            _draw(asked, outcome, plot)
        if world.launcher != NONE and (done := os.environ.get(_DONE)):
            Path(done).touch()


def _asked(
    run: Path,
    run2: Path | None,
    points: str,
    samples: int,
    part: str,
    which: str | None,
    seed: int,
    limit: str,
    device: str,
    trust: bool,
) -> "Asked":
    """Return the checked request, without importing torch."""
    from allstep.errors import ConfigError
    from allstep.study.landscape.asked import Asked
    from allstep.study.landscape.points import parse_points
    from allstep.train.folder.existing_run import Evaluation, SplitName
    from allstep.train.health.stop_request import parse_time

    if part not in get_args(SplitName):
        raise ConfigError(f"--part: expected train, validation or test, found {part!r}")
    grid, weights, split = parse_points(points), checked_which(which), cast("SplitName", part)
    runs = [
        Evaluation(each, split, weights, device=device, trust=trust, num_samples=samples)
        for each in (run, run2)
        if each is not None
    ]
    for each in runs:
        each.config()
    if len(runs) == 2 and run.resolve() == runs[1].folder.resolve():
        raise ConfigError(f"{run} and {run2} are the same run; the line needs two")
    second = runs[1] if len(runs) == 2 else None
    return Asked(runs[0], second, grid, seed, parse_time(limit, "--limit"))


def _start(num_workers: int) -> int:
    """Start the same command on `num_workers` workers and return their exit status.

    Rank 0 creates a file once it has printed the result. Raise if that file is missing after exit
    status 0: the status alone does not prove that there is a result.
    """
    from allstep.launch import launch
    from allstep.train.config.num_workers import no_result

    command = run_module("allstep", *sys.argv[1:])
    with tempfile.TemporaryDirectory(prefix="allstep-landscape-") as folder:
        done = Path(folder) / "done"
        env = {**os.environ, "ALLSTEP_LAUNCHER": "allstep", _DONE: str(done)}
        code = launch([*command, "--workers", str(num_workers)], num_workers, env=env)
        if not code and not done.exists():
            raise no_result("a landscape")
    return code


def _work(asked: "Asked", launcher: str | None) -> "Landscape | None":
    """Compute as a worker, with a progress bar on rank 0; only rank 0 returns the outcome."""
    from allstep.cli.torch_import import import_torch
    from allstep.console.progress_bar import bar

    import_torch(optimizers=False)
    from allstep.study.landscape.run_surveys import work

    with bar("landscape", "points", on_stdout=True) as shown:
        return work(asked, _announce, lambda done, total: shown(done, total, ""), launcher)


def _announce(expected: "Expected") -> None:
    """Print what will be computed and how long it takes."""
    from allstep.console.quantities import about, milliseconds, plural

    before = expected.num_points - expected.num_left
    computed = f" ({before:,} more were computed before)" if before else ""
    print_notice(
        f"{expected.num_left:,} evaluations of {plural(expected.num_samples, 'sample')}{computed},"
        f" {milliseconds(expected.point_seconds)} each: about {about(expected.seconds)} with"
        f" {plural(expected.num_workers, 'worker')}"
    )


def _show(asked: "Asked", outcome: "Landscape", *, stderr: bool) -> None:
    """Print the result as a table, and the commands that check and draw it."""
    from allstep.console.rich_table import name_value_table, print_table
    from allstep.study.landscape.summary import around_rows, line_rows

    print_notes(outcome.notes)
    rows = [
        (
            "run",
            f"{outcome.around.run}, the {outcome.which} weights, after {outcome.samples:,} samples",
        ),
        ("loss of", outcome.where),
        *around_rows(outcome.around),
        *(line_rows(outcome.line) if outcome.line else []),
        ("stored in", str(asked.first.folder / "landscape")),
    ]
    print_table(name_value_table(rows), stderr=stderr)
    if not stderr:
        print_line(f"draw it: {shlex.join(['allstep', 'report', str(asked.first.folder)])}")
        print_line(f"check the center: {_eval_command(asked, outcome)}")


def _eval_command(asked: "Asked", outcome: "Landscape") -> str:
    """Return the command that evaluates the center on the same samples."""
    first = asked.first
    command = ["allstep", "eval", str(first.folder), "--part", first.split]
    command += ["--samples", str(first.num_samples), "--which", outcome.which]
    return shlex.join(command)


def _draw(asked: "Asked", outcome: "Landscape", file: Path) -> None:
    """Draw the landscape of the run, and of the second one if it has one on the same grid."""
    from allstep.report.landscape import draw_file
    from allstep.study.landscape.result import read_around

    found = [outcome.around]
    if asked.second is not None:
        try:
            other = read_around(asked.second.folder)
        except (OSError, ValueError):
            other = None
        if other is not None and len(other.grid) == len(outcome.around.grid):
            found.append(other)
        else:
            print_notice(
                f"--plot: {asked.second.folder} has no landscape yet, so only its flatness and the"
                f" line are drawn; `allstep landscape {asked.second.folder}` computes it"
            )
    draw_file(found, outcome.line, file)
