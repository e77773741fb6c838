"""`allstep data`: get, pack, look at and check sets of samples."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from allstep.data.fetch import Progress

data = typer.Typer(name="data", help="Get, pack, look at and check sets of samples.", no_args_is_help=True)


@data.callback()
def _root() -> None:
    """Get, pack, look at and check sets of samples."""


@data.command()
def get(
    name: Annotated[str, typer.Argument(help="fashion-mnist or cifar10.")],
    origin: Annotated[
        str | None, typer.Option("--from", metavar="FOLDER|URL", help="Who has the files; else their home on the web.")
    ] = None,
    to: Annotated[Path | None, typer.Option("--to", metavar="DIR", help="Else allstep's cache folder.")] = None,
) -> None:
    """Bring a named set here; every file's SHA-256 is checked."""
    from allstep.data.getting import get as bring
    from allstep.data.named import cache_folder
    from allstep.data.sets import named_set

    wanted = named_set(name)
    folder = to or cache_folder() / wanted.name
    with _download() as told:
        bring(wanted, folder, origin, told)
    print(f"{wanted.title} is in {folder}")


@contextmanager
def _download() -> "Iterator[Progress]":
    """A bar for each file, on a terminal."""
    from rich.console import Console
    from rich.progress import DownloadColumn, Progress, TaskID

    console = Console(stderr=True)
    tasks: dict[str, TaskID] = {}
    with Progress(
        "{task.description}", DownloadColumn(), console=console, transient=True, disable=not console.is_terminal
    ) as bar:

        def told(name: str, done: int, total: int | None) -> None:
            if name not in tasks:
                tasks[name] = bar.add_task(name, total=total)
            bar.update(tasks[name], completed=done, total=total)

        yield told
