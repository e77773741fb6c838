"""`allstep verify`: do N workers compute what one does?

The launching process makes a folder, starts the same few steps with one number of workers after the
other, and removes the folder. The workers are this same verb, told by `--answers` where the plan
lies.
"""

import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from allstep.console.escape import print_line
from allstep.files.atomic import replace_file
from allstep.process.python import run_module

if TYPE_CHECKING:
    from allstep.train.check.compare import Answer, Plan
    from allstep.train.config.run_config import RunConfig


def verify(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RECIPE|CONFIG.yaml KEY=VALUE", help="What to verify, and what to change in it."
        ),
    ] = None,
    workers: Annotated[
        str,
        typer.Option(
            "--workers", "-n", metavar="N,N", help="Numbers of workers; the first is the reference."
        ),
    ] = "1,2,4",
    data: Annotated[
        Path | None, typer.Option(help="The folder with the data's files; else the usual places.")
    ] = None,
    trust: Annotated[
        bool,
        typer.Option("--trust", help="Execute the model code that a run folder's config names."),
    ] = False,
    answers: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Run a few steps in float64 with each number of workers and show that all compute the same, or
    where they part."""
    from allstep.errors import ConfigError
    from allstep.train.config.read import default_source, split_arguments
    from allstep.world import NONE, World

    sources, words = split_arguments(arguments or [])
    words += ["trust=true"] if trust else []
    if len(sources) > 1:
        raise ConfigError(
            f"expected one recipe or config file, found {', '.join(map(repr, sources))}"
        )
    source = sources[0] if sources else default_source(words)
    launcher = World.detect().launcher
    if answers is not None:
        _work(source, answers)
    elif launcher != NONE:
        raise ConfigError(
            f"allstep verify starts its workers itself, and {launcher} has started it as one: call"
            " it alone"
        )
    else:
        raise typer.Exit(_start(source, words, workers, data))


def _work(source: str, answers: Path) -> None:
    from allstep.train.check.verify import work
    from allstep.train.config.read import read_config

    work(read_config(source).resolved(1), answers)


def _start(source: str, words: list[str], workers: str, data: Path | None) -> int:
    """One number of workers after the other; 0 when all agree, 1 when not."""
    from allstep.train.check.compare import made_exact, make_plan, parse_workers, write_plan
    from allstep.train.run.prepare import Prepared, check, prepare

    numbers = parse_workers(workers)
    prepared = prepare(source, words, data)
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
    return _tell(plan, answers)


def _answer(
    config: "RunConfig", plan: "Plan", number: int, folder: Path, answers: "list[Answer]"
) -> int:
    """Starts the workers and adds their answer; the exit status if they have none."""
    from allstep.launch import launch
    from allstep.train.check.compare import named, read_answer
    from allstep.train.config.num_workers import no_result

    steps = (
        f"{len(plan.batches)} steps of {', '.join(map(str, plan.batches))} samples and"
        f" {plan.evaluated} of the validation part"
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


def _tell(plan: "Plan", answers: "Sequence[Answer]") -> int:
    """The table and the verdict."""
    from allstep.console.text_table import columns
    from allstep.train.check.compare import differing_answers, named, table

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
