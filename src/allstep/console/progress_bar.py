"""How far a long piece of work is, on standard error: bars on a terminal, elsewhere plain lines or
nothing.

```
bar          one piece of work of so many parts; plain lines now and then where there is no terminal
step_bar     work whose parts are announced by name
file_bars    files of so many bytes, one bar each
text_bar     bars whose text the caller writes
```
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING

from allstep.console.escape import escaped

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn

_SECONDS = 10.0  # between two plain lines

Shown = Callable[[int, int, str], None]
"""Takes what is done, of how much, and a word more."""


@contextmanager
def bar(what: str, unit: str = "samples") -> Iterator[Shown]:
    """Shows progress while the block runs."""
    with _bar(what) if sys.stderr.isatty() else _lines(what, unit) as shown:
        yield shown


@contextmanager
def step_bar(total: int) -> Iterator[Callable[[str], None]]:
    """Show a bar on a terminal; each call names the next of `total` parts."""
    with _progress() as drawn:
        task, done = drawn.add_task("", total=total), count()
        yield lambda text: drawn.update(task, description=text, completed=next(done))


@contextmanager
def file_bars() -> Iterator[Callable[[str, int, int | None], None]]:
    """Show a bar for each file on a terminal, by its name, the bytes so far and the bytes in all
    (None: not known)."""
    from rich.progress import DownloadColumn, TaskID

    tasks: dict[str, TaskID] = {}
    with _progress(_text("{task.description}"), DownloadColumn()) as drawn:

        def update(name: str, done: int, total: int | None) -> None:
            if name not in tasks:
                tasks[name] = drawn.add_task(escaped(name), total=total)
            drawn.update(tasks[name], completed=done, total=total)

        yield update


@contextmanager
def text_bar() -> "Iterator[Progress]":
    """Show bars with a text in front and another one, the field `more`, behind."""
    from rich.progress import BarColumn

    with _progress(_text("{task.description}"), BarColumn(), _text("{task.fields[more]}")) as drawn:
        yield drawn


@contextmanager
def _bar(what: str) -> Iterator[Shown]:
    from rich.progress import BarColumn, MofNCompleteColumn, TimeRemainingColumn

    further = _text("{task.fields[more]}")
    columns = (
        _text("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        further,
    )
    with _progress(*columns) as drawn:
        task = drawn.add_task(what, total=None, more="")

        def shown(done: int, total: int, more: str = "") -> None:
            drawn.update(task, completed=done, total=total, more=escaped(more))

        yield shown


def _text(template: str) -> "ProgressColumn":
    """A column of text. It may be the name of a file: square brackets in it are no markup."""
    from rich.progress import TextColumn

    return TextColumn(template, markup=False)


def _progress(*columns: "ProgressColumn") -> "Progress":
    """Bars on standard error that vanish at the end; nothing where it is not a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True, highlight=False)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


@contextmanager
def _lines(what: str, unit: str) -> Iterator[Shown]:
    begun = last = time.monotonic()

    def shown(done: int, total: int, more: str = "") -> None:
        nonlocal last
        now = time.monotonic()
        if now - last < _SECONDS:
            return
        last = now
        rate = done / max(now - begun, 1e-3)
        line = f"{what}: {done} of {total} {unit}, {rate:.0f}/s{', ' + more if more else ''}"
        print(escaped(line), file=sys.stderr, flush=True)

    yield shown
