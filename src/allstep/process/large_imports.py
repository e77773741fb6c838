"""Importing large libraries in half the time: without the garbage collector.

While a library is imported, objects are made by the hundred thousand and nearly all stay. The
collector does not know: it looks at all of them again and again, and once more when the interpreter
ends. torch with its optimizers takes 2.6 s of processor time from start to exit, and 1.4 s without
this.

For processes of allstep's own, such as the workers of `allstep train`. A process of the user's
keeps its collector as the user set it.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Keep the collector from running, and from ever looking at what exists at the end.

    Call it before data of the user are loaded: what is in a cycle then is never freed.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
