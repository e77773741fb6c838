"""`allstep verify`: check that N workers compute the same as one.

The launching process creates a folder with the plan, runs the same few steps with each number of
workers in turn, and removes the folder. The workers run this same verb; `--answers` names the
folder of the plan.
"""

import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from allstep.cli.options import DataFolder, Trust
from allstep.console.escape import print_line
from allstep.files.atomic import replace_file
from allstep.process.python import run_module

if TYPE_CHECKING:
    from allstep.train.check.compare_workers import Answer, Plan
    from allstep.train.config.run_config import RunConfig


def verify(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RECIPE|CONFIG.yaml KEY=VALUE",
            help="Recipe or config file to verify, and config keys to change.",
        ),
    ] = None,
    workers: Annotated[
        str,
        typer.Option(
            "--workers", "-n", metavar="N,N", help="Numbers of workers; the first is the reference."
        ),
    ] = "1,2,4",
    data: DataFolder = None,
    trust: Trust = False,
    answers: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Check that several workers compute the same as one.

    Runs a few steps in float64 with each number of workers and shows where the results differ. The
    exit status is 1 if they do.
    """
    from allstep.errors import ConfigError
    from allstep.train.config.read_config import default_source, split_arguments
    from allstep.world import NONE, World

    sources, overrides = split_arguments(arguments or [])
    overrides += ["trust=true"] if trust else []
    if len(sources) > 1:
        raise ConfigError(
            f"expected one recipe or config file, found {', '.join(map(repr, sources))}"
        )
    source = sources[0] if sources else default_source(overrides)
    launcher = World.detect().launcher
    if answers is not None:
        _work(source, answers)
    elif launcher != NONE:
        raise ConfigError(
            f"allstep verify starts its workers itself, but {launcher} started it as a worker; run"
            f" it without {launcher}"
        )
    else:
        raise typer.Exit(_start(source, overrides, workers, data))


def _work(source: str, answers: Path) -> None:
    """Run the steps of the plan in the folder `answers` as a worker."""
    from allstep.cli.torch_import import import_torch

    import_torch(optimizers=True)
    from allstep.train.check.verify import work
    from allstep.train.config.read_config import read_config

    work(read_config(source).resolved(1), answers)


def _start(source: str, overrides: list[str], workers: str, data: Path | None) -> int:
    """Run the plan with each number of workers; return 0 if all results agree, 1 if not."""
    from allstep.train.check.compare_workers import made_exact, make_plan, parse_workers, write_plan
    from allstep.train.run.prepare import Prepared, check, prepare

    numbers = parse_workers(workers)
    prepared = prepare(source, overrides, data)
    config, notes = made_exact(prepared.config, numbers)
    splits = check(Prepared(config))
    plan = make_plan(config, numbers, len(splits.validation))
    for note in [*([prepared.note] if prepared.note else []), *notes]:
        print_line(f"note: {note}")
    with tempfile.TemporaryDirectory(prefix="allstep-verify-") as name:
        folder = Path(name)
        replace_file(folder / "config.yaml", config.to_yaml().encode())
        write_plan(folder, plan)
        answers: list[Answer] = []
        for number in numbers:
            if code := _answer(config, plan, number, folder, answers):
                return code
    return _report(plan, answers)


def _answer(
    config: "RunConfig", plan: "Plan", number: int, folder: Path, answers: "list[Answer]"
) -> int:
    """Run the plan with `number` workers and append their answer; return their exit status."""
    from allstep.launch import launch
    from allstep.train.check.compare_workers import named, read_answer
    from allstep.train.config.num_workers import no_result

    steps = (
        f"{len(plan.batches)} steps of {', '.join(map(str, plan.batches))} samples and"
        f" {plan.evaluated} of the validation split"
    )
    print(f"{named(number)}: {steps} ...", flush=True)
    started = time.monotonic()
    command = run_module("allstep", "verify", str(folder / "config.yaml"), "--answers", str(folder))
    code = launch(command, number, env={**os.environ, "ALLSTEP_LAUNCHER": "allstep"})
    if code:
        print(
            f"{named(number)}: ended with {code}, so there is nothing to compare", file=sys.stderr
        )
        return code
    try:
        answers.append(read_answer(folder, number))
    except FileNotFoundError as error:
        raise no_result("their answer") from error
    for note in answers[-1].notes if len(answers) == 1 else ():
        print_line(f"note: {note}")
    print(f"{named(number)}: {time.monotonic() - started:.1f} s", flush=True)
    return 0


def _report(plan: "Plan", answers: "Sequence[Answer]") -> int:
    """Print the table and the verdict; return the exit status."""
    from allstep.console.text_table import columns
    from allstep.train.check.compare_workers import differing_answers, named, table

    for line in columns(list(table(plan, answers))):
        print_line(line)
    found = list(differing_answers(plan, answers))
    for line in found:
        print_line(f"allstep: {line}")
    if not found:
        print(
            f"all agree to {plan.tolerance:g}: {', '.join(named(each.workers) for each in answers)}"
            " compute the same"
        )
    return 1 if found else 0
