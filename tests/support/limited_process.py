"""Cases that must end: each within 20 s, and all in a process that gets 2 GB of memory and no more.

For tests that read what another person may have written: a hang, a crash or memory without end must
fail the test, not the machine.
"""

import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

SOAK = bool(os.environ.get("ALLSTEP_SOAK"))
SECONDS = 20
NBYTES = 2 << 30
Case = TypeVar("Case")


def limited(function: Callable[[Case], object], cases: Iterable[Case]) -> int:
    """Call `function` with each case in a child process; return how many there were.

    AssertionError with the case that it did not survive.
    """
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        _run(function, cases, write)
    os.close(write)
    with os.fdopen(read, errors="replace") as output:
        text = output.read()
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code == 0, f"ended with {code}; the last case and its error:\n{text[-4000:]}"
    return text.count("\n")


def _run(function: Callable[[Case], object], cases: Iterable[Case], write: int) -> None:
    code = 1
    try:
        # Of pytest-timeout, in the parent.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_AS, (_mapped() + NBYTES, resource.RLIM_INFINITY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        for case in cases:
            os.write(write, ascii(case)[:2000].encode() + b"\n")
            signal.alarm(SECONDS)
            function(case)
            signal.alarm(0)
        code = 0
    except BaseException:
        os.write(write, traceback.format_exc().encode(errors="replace"))
    finally:
        sys.stdout.flush()
        os._exit(code)


def _mapped() -> int:
    """Bytes of address space that are in use: torch maps much more than it fills."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def seeds(count: int, minutes: float = 2.0) -> Iterable[int]:
    """The same `count` numbers each time; in a soak new ones, for some minutes."""
    if not SOAK:
        yield from range(count)
        return
    end = time.monotonic() + 60 * minutes
    while time.monotonic() < end:
        yield int.from_bytes(os.urandom(6))
