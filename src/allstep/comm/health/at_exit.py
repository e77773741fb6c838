"""Process exit while torch's groups still exist.

Two things go wrong in torch if a script ends without `destroy_process_group()`, or ends early with
an exception:

* A Gloo group waits in its destructor for operations under way: half an hour if its peers are lost.
  It also aborts if its Python store was destroyed before it.
* A Gloo thread that has just finished an operation frees its tensors, for which it needs the
  interpreter. If that is being finalized, the thread is ended in the middle of a destructor and the
  process aborts.

So at exit the groups and the store are kept from being destroyed (the kernel closes their sockets
anyway, and at once), and the Gloo threads get some time to become idle. A Gloo group that has
failed may have an operation stuck in it (see `helper_thread`), for which its destructor would wait:
after our group is destroyed, a thread destroys it (`destroy_later`). That usually takes a
millisecond. At exit such threads get a second to end: one that returns from a destructor while the
interpreter is being finalized is ended there, and the process aborts, too.
"""

import atexit
import ctypes
import sys
import threading
import time
import weakref
from collections.abc import Iterable
from pathlib import Path

_GLOO_THREAD = "pt_gloo_runloop"
_REST_SECONDS = 0.5
# Seconds after which our group, while being destroyed, has dropped its reference to a Gloo group.
_OTHERS_SECONDS = 0.05
# Seconds that threads which destroy groups get at exit.
_DESTROY_SECONDS = 1.0

_destroying: list[threading.Thread] = []
_ending = threading.Event()


def keep(things: Iterable[object]) -> None:
    """Keep objects from ever being destroyed, by one more reference to each."""
    for thing in things:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def destroy_later(gloos: Iterable[object], group: object) -> None:
    """Keep failed Gloo groups until `group` is destroyed; then destroy them in a thread.

    `group` is our group, which holds references to them, too.
    """
    kept = list(gloos)
    keep(kept)
    weakref.finalize(group, _destroy_in_thread, kept).atexit = False


def _destroy_in_thread(kept: list[object]) -> None:
    if sys.is_finalizing() or _ending.is_set():
        return
    _destroying[:] = [each for each in _destroying if each.is_alive()]
    thread = threading.Thread(target=_destroy, args=(kept,), name="allstep-destroy", daemon=True)
    _destroying.append(thread)
    thread.start()


def _await_destruction() -> None:
    """Wait until no thread destroys a group, at most a second: called at exit, among the last."""
    _ending.set()
    end = time.monotonic() + _DESTROY_SECONDS
    for thread in list(_destroying):
        # A forked child has the list, and not the threads.
        if thread.is_alive():
            thread.join(max(0.0, end - time.monotonic()))


# Handlers run in reverse order: this module is imported before groups exist.
atexit.register(_await_destruction)


def _destroy(kept: list[object]) -> None:
    time.sleep(_OTHERS_SECONDS)
    while kept:
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(kept[-1]))
        kept.pop()


def leave_alone(kept: Iterable[object]) -> None:
    """Keep objects from being destroyed, and wait until no Gloo thread runs, at most 0.5 s.

    Only for the end of a process or of a group.
    """
    keep(kept)
    end = time.monotonic() + _REST_SECONDS
    at_rest = 0
    while at_rest < 2 and time.monotonic() < end:
        # Sleeping releases the interpreter lock to a thread that waits for it: if no thread runs in
        # two checks in a row, none waits.
        time.sleep(0.001)
        at_rest = 0 if "R" in _gloo_threads() else at_rest + 1


def _gloo_threads() -> list[str]:
    """Return the states of this process's Gloo threads: S is asleep, R is running or runnable."""
    states = []
    for task in Path("/proc/self/task").iterdir():
        try:
            name, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
        except OSError:
            continue
        if name == _GLOO_THREAD:
            states.append(rest.split()[0])
    return states
