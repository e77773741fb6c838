"""Describe in one line what this process has run out of: open files, memory or threads.

The limits of a shell, a container or a queue (`ulimit -n`, `-v`, `-u`) can stop any line of the
program, even in the middle of an import. The traceback shows that line, not the limit. With too
little memory PyTorch may end by SIGSEGV without any message, so memory is checked before PyTorch is
imported.
"""

import errno
import resource
from collections.abc import Iterator

from allstep.console.quantities import nbytes
from allstep.errors import ConfigError

_FILES = (errno.EMFILE, errno.ENFILE)
# Texts by which Gloo, the dynamic linker, torch and C++ report it, in ImportError or RuntimeError.
_FILES_TEXT = "Too many open files"
_MEMORY = ("failed to map segment", "annot allocate memory", "can't allocate memory", "bad_alloc")
_THREADS = ("can't start new thread", "Resource temporarily unavailable", "thread creation failed")
# Bytes. PyTorch 2.13 maps 1 GB on import; with less than this, workers crash at their start.
_LEAST_MEMORY = 1.5e9


def check_memory() -> None:
    """Raise ConfigError when `ulimit -v` is too low for PyTorch."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY and soft < _LEAST_MEMORY:
        raise ConfigError(
            f"{_memory()}, but PyTorch needs {nbytes(_LEAST_MEMORY)} of address space or more"
            "; raise the limit with `ulimit -v unlimited`"
        )


def shortage(error: BaseException) -> str | None:
    """Return one line about the resource that is missing; None for any other error."""
    for each in _chain(error):
        text = str(each)
        if (isinstance(each, OSError) and each.errno in _FILES) or _FILES_TEXT in text:
            limit = _limit(resource.RLIMIT_NOFILE, "no limit set here")
            return f"too many open files ({limit}); raise it with `ulimit -n 1024` and try again"
        if any(mark in text for mark in _THREADS):
            limit = _limit(resource.RLIMIT_NPROC, "no limit on processes")
            found = f"no more threads or processes can be started ({limit}, {_memory()})"
            return f"{found}; raise the limits or use fewer workers"
        is_memory = isinstance(each, OSError) and each.errno == errno.ENOMEM
        if is_memory or isinstance(each, MemoryError) or any(mark in text for mark in _MEMORY):
            detail = f": {text.splitlines()[0]}" if text else ""
            advice = "use fewer workers or a smaller batch, or raise the limit"
            return f"out of memory ({_memory()}){detail}; {advice}"
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the error and the chain of errors it was raised from (`__cause__`).

    An error that was merely being handled at that time (`__context__`) is left out: it could hide a
    defect.
    """
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__


def _memory() -> str:
    """Return the limit on address space as text."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft == resource.RLIM_INFINITY:
        return "no limit on memory"
    return f"`ulimit -v` allows {nbytes(soft)}"


def _limit(which: int, otherwise: str) -> str:
    """Return the soft limit of resource `which` as text, or `otherwise` if there is none."""
    soft, _ = resource.getrlimit(which)
    return otherwise if soft == resource.RLIM_INFINITY else f"the limit is {soft}"
