"""Leaving the process while torch's groups are alive.

Two things go wrong in torch when a script ends without `destroy_process_group()`, or ends early
with an exception:

* A Gloo group waits in its destructor for operations that are under way: half an hour if its peers
  are gone. It also aborts when its Python store was torn down before it.
* A Gloo thread that has just finished an operation frees the tensors of it, for which it needs the
  interpreter; if that is already being torn down, the thread is ended in the middle of a destructor
  and the process aborts.

So at exit the groups and the store are kept from being torn down (the kernel closes their sockets
just as well, and at once), and the Gloo threads get a moment to come to rest. A Gloo group that has
failed may have an operation stuck in it (see `helper_thread`), for which its destructor would wait:
when our group is gone, a thread destroys it (`destroy_aside`). Mostly that takes a millisecond.
"""

import ctypes
import sys
import threading
import time
import weakref
from collections.abc import Iterable
from pathlib import Path

_GLOO_THREAD = "pt_gloo_runloop"
_REST_SECONDS = 0.5
# in which the last other reference to a Gloo group goes, once our group is being destroyed
_OTHERS_SECONDS = 0.05


def keep(things: Iterable[object]) -> None:
    """Keep objects from ever being destroyed."""
    for thing in things:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def destroy_later(gloos: Iterable[object], group: object) -> None:
    """Keep Gloo groups that have failed until `group`, which holds them too, is gone; then a thread
    destroys them."""
    kept = list(gloos)
    keep(kept)
    weakref.finalize(group, _destroy_in_thread, kept).atexit = False


def _destroy_in_thread(kept: list[object]) -> None:
    if not sys.is_finalizing():
        threading.Thread(target=_destroy, args=(kept,), name="allstep-destroy", daemon=True).start()


def _destroy(kept: list[object]) -> None:
    time.sleep(_OTHERS_SECONDS)
    while kept:
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(kept[-1]))
        kept.pop()


def leave_alone(kept: Iterable[object]) -> None:
    """`keep` them, and wait until no Gloo thread runs. Call it at exit only."""
    keep(kept)
    end = time.monotonic() + _REST_SECONDS
    at_rest = 0
    while at_rest < 2 and time.monotonic() < end:
        # Sleeping lets a thread that waits for the interpreter have it: two looks in a row then
        # prove that none does.
        time.sleep(0.001)
        at_rest = 0 if "R" in _gloo_threads() else at_rest + 1


def _gloo_threads() -> list[str]:
    """The states of the Gloo threads of this process: S is asleep, R is running or about to."""
    states = []
    for task in Path("/proc/self/task").iterdir():
        try:
            name, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
        except OSError:
            continue
        if name == _GLOO_THREAD:
            states.append(rest.split()[0])
    return states
