"""Parents, children and orphans: no process may outlive the run that it belongs to.

```
die_with_parent   in a child before exec: the kernel kills it when its parent ends
adopt_orphans     in a parent: children of a child that has ended become its own children
descendants       every living process below a process, in any session
kill_children     kill all children, and adopted ones, until there is none
reap              collect the exit status of children that have ended
keep_exit_codes   let this process learn the exit status of its children
```

`die_with_parent` is meant for `subprocess.Popen(preexec_fn=...)`. The kernel sends the signal when
the *thread* that forked ends, so start children from a thread that lives as long as the process.
"""

import contextlib
import ctypes
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
# Loaded at import, because no library may be opened between fork and exec.
_prctl = ctypes.CDLL(None, use_errno=True).prctl


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends (a "subreaper")."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


@contextlib.contextmanager
def keep_exit_codes() -> Iterator[None]:
    """Restore the default of SIGCHLD for the duration of the block, if it is ignored.

    A program that ignores SIGCHLD passes that on to what it executes. The kernel then discards
    the exit status of every child, and a failed one looks like one that ended with status 0. Only
    the main thread can change it; elsewhere this does nothing.
    """
    ignored = signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN
    if not ignored or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)


def descendants(root: int) -> list[int]:
    """Return the pids of all living processes below `root`, by the parents that /proc shows."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
                if fields[0] != "Z":
                    children.setdefault(int(fields[1]), []).append(int(entry))
    found: list[int] = []
    parents = [root]
    while parents:
        below = children.get(parents.pop(), [])
        found += below
        parents += below
    return found


def kill_children() -> None:
    """Kill every child, also those adopted after `adopt_orphans`, and wait until all have ended."""
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    while True:
        for child in children.read_text().split():
            os.kill(int(child), signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def reap() -> None:
    """Collect children that have ended, without waiting for any."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
