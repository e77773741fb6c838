"""The position of this process: the running engine, and Horovod's names for rank and size.

A process is initialized from its own `init()` to its own `shutdown()`. A peer that shuts down or
fails stops the engine but does not change our position: `rank()` and `size()` still work,
collectives raise.
"""

from allstep import engine
from allstep.engine import Engine

NOT_INITIALIZED = "Horovod has not been initialized; call hvd.init() first"


def running() -> Engine:
    """Return the engine between `init()` and `shutdown()`; raise ValueError outside."""
    current = engine.current()
    if current is None:
        raise ValueError(NOT_INITIALIZED)
    return current


def is_initialized() -> bool:
    """Return whether this process has called `init()` and not yet `shutdown()`."""
    return engine.current() is not None


def rank() -> int:
    """Return the number of this process among all processes, from 0."""
    return running().world.rank


def size() -> int:
    """Return the number of processes."""
    return running().world.size


def local_rank() -> int:
    """Return the number of this process among the processes of its host, from 0."""
    return running().world.local_rank


def local_size() -> int:
    """Return the number of processes on this host."""
    return running().world.local_size


def cross_rank() -> int:
    """Return the number of this host among the hosts that have a process with our local rank."""
    return running().world.cross_rank


def cross_size() -> int:
    """Return the number of hosts that have a process with our local rank."""
    return running().world.cross_size
