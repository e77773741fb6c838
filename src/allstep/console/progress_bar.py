"""Progress of long work on standard error: bars on a terminal, elsewhere plain lines or nothing.

```
bar          one bar that counts done parts; without a terminal a plain line every 10 s
step_bar     one bar over named steps
file_bars    one bar per file, in bytes
text_bar     bars with texts that the caller sets
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

# Between two plain lines.
_SECONDS = 10.0

Shown = Callable[[int, int, str], None]
"""Shows progress: called with the number done, the total, and a text to show behind them."""


@contextmanager
def bar(what: str, unit: str = "samples", *, on_stdout: bool = False) -> Iterator[Shown]:
    """Show progress while the block runs, which calls the yielded function.

    what: the text in front. unit: what is counted, for plain lines (default "samples"). on_stdout:
    draw on standard output if only that is a terminal, as for rank 0 of several workers.
    """
    if sys.stderr.isatty():
        drawn = _bar(what)
    elif on_stdout and sys.stdout.isatty():
        drawn = _bar(what, stderr=False)
    else:
        drawn = _lines(what, unit)
    with drawn as shown:
        yield shown


@contextmanager
def step_bar(total: int) -> Iterator[Callable[[str], None]]:
    """Show a bar on a terminal; each call of the yielded function names one of `total` steps."""
    with _progress() as drawn:
        task, done = drawn.add_task("", total=total), count()
        yield lambda text: drawn.update(task, description=text, completed=next(done))


@contextmanager
def file_bars() -> Iterator[Callable[[str, int, int | None], None]]:
    """Show a bar for each file on a terminal.

    The block calls the yielded function with name, bytes done, and total bytes (None: not known).
    """
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
    """Show bars with a text in front, the description, and another one behind, the field `more`."""
    from rich.progress import BarColumn

    with _progress(_text("{task.description}"), BarColumn(), _text("{task.fields[more]}")) as drawn:
        yield drawn


@contextmanager
def _bar(what: str, *, stderr: bool = True) -> Iterator[Shown]:
    from rich.progress import BarColumn, MofNCompleteColumn, TimeRemainingColumn

    counts = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    texts = (_text("{task.description}"), _text("{task.fields[more]}"))
    with _progress(texts[0], *counts, texts[1], stderr=stderr) as drawn:
        task = drawn.add_task(what, total=None, more="")

        def shown(done: int, total: int, more: str = "") -> None:
            drawn.update(task, completed=done, total=total, more=escaped(more))

        yield shown


def _text(template: str) -> "ProgressColumn":
    """Return a column of text without markup: it may be a file name with square brackets."""
    from rich.progress import TextColumn

    return TextColumn(template, markup=False)


def _progress(*columns: "ProgressColumn", stderr: bool = True) -> "Progress":
    """Return bars on standard error (or output) that vanish at the end; hidden without terminal."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=stderr, highlight=False)
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
