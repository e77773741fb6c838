"""How far a long piece of work is: a bar on a terminal, elsewhere a plain line now and then. Both go to standard error."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from allstep.console.escape import escaped

_SECONDS = 10.0  # between two plain lines

Shown = Callable[[int, int, str], None]
"""Takes what is done, of how much, and a word more."""


@contextmanager
def bar(what: str, unit: str = "samples") -> Iterator[Shown]:
    """Shows progress while the block runs."""
    with _bar(what) if sys.stderr.isatty() else _lines(what, unit) as shown:
        yield shown


@contextmanager
def _bar(what: str) -> Iterator[Shown]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    # `more` may be the name of a file: square brackets in it are no markup.
    texts = ("{task.description}", "{task.fields[more]}")
    named, further = (TextColumn(text, markup=False) for text in texts)
    columns = (named, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), further)
    with Progress(*columns, console=Console(stderr=True), transient=True) as drawn:
        task = drawn.add_task(what, total=None, more="")

        def shown(done: int, total: int, more: str = "") -> None:
            drawn.update(task, completed=done, total=total, more=escaped(more))

        yield shown


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
