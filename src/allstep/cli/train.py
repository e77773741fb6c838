"""`allstep train`: from a recipe or a config to a trained net.

Outside a world this process is the launching one: it checks config and data (no torch so far, so bad input is answered at once), makes
the run folder and starts the workers. Inside a world (allstep run, torchrun, mpirun, srun) it is a worker.
"""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer


def train(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="RECIPE|CONFIG.yaml KEY=VALUE", help="What to train, and what to change in it."),
    ] = None,
    workers: Annotated[
        int | None, typer.Option("--workers", "-n", min=1, help="How many; else one per GPU, or per core, up to 8.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The run folder; else runs/<recipe>-<time>.")] = None,
    data: Annotated[Path | None, typer.Option(help="The folder with the data's files; else the usual places.")] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="End at the first bad sample; short for data.strict=true.")
    ] = False,
    launcher: Annotated[
        str | None, typer.Option(help="Whose word counts about the world, instead of finding out.")
    ] = None,
    list_recipes: Annotated[bool, typer.Option("--list", help="Show the recipes and stop.")] = False,
) -> None:
    """Train a net: `allstep train`, `allstep train digits epochs=5 optimizer.lr=0.1`, `allstep train mine.yaml`."""
    from allstep.world import NONE, World

    if list_recipes:
        _list()
        return
    source, words = _split(arguments or [])
    words += ["data.strict=true"] if strict else []
    world = World.detect(launcher)
    if world.launcher == NONE:
        raise typer.Exit(_start(source, words, workers, out, data))
    from allstep.train.workers import check_num_workers

    check_num_workers(workers, world)
    from allstep.train.worker import Asked, work

    work(Asked(source, words, data, out), launcher)


def _list() -> None:
    from allstep.train.recipes import RECIPES

    for name, recipe in RECIPES.items():
        print(f"{name:<16} {recipe.__doc__}")


def _split(arguments: list[str]) -> tuple[str, list[str]]:
    """The recipe or file, and the words that change it."""
    from allstep.errors import ConfigError
    from allstep.train.recipes import DEFAULT

    sources = [argument for argument in arguments if "=" not in argument]
    if len(sources) > 1:
        raise ConfigError(
            f"expected one recipe or config file, found {', '.join(map(repr, sources))}; keys are set by key=value"
        )
    return (sources[0] if sources else DEFAULT), [argument for argument in arguments if "=" in argument]


def _start(source: str, words: list[str], workers: int | None, out: Path | None, data: Path | None) -> int:
    """Check everything, then start the workers; their exit status."""
    from allstep.launch import launch
    from allstep.train.folder import make_run_folder
    from allstep.train.prepare import check, prepare
    from allstep.train.workers import default_num_workers

    prepared = prepare(source, words, data, _show_download)
    check(prepared)
    if prepared.note:
        print(f"allstep: {prepared.note}", file=sys.stderr)
    num_workers = workers or default_num_workers(prepared.config)
    folder = make_run_folder(prepared.config.resolved(num_workers), out)
    command = [sys.executable, "-m", "allstep", "train", str(folder / "config.yaml"), "--out", str(folder)]
    return launch(command, num_workers, env={**os.environ, "ALLSTEP_LAUNCHER": "allstep"})


def _show_download(name: str, done: int, total: int | None) -> None:
    """One line that is written over; nothing where nobody looks."""
    if sys.stderr.isatty():
        of = f" of {total / 1e6:.1f}" if total else ""
        end = "\n" if done == total else ""
        print(f"\rdownloading {name}: {done / 1e6:.1f}{of} MB", end=end, file=sys.stderr, flush=True)
