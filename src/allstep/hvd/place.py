"""Where this process stands: the running engine, and Horovod's words for rank and size.

A process is initialised from its own `init()` to its own `shutdown()`. That a peer has shut down,
or died, stops the engine but does not change our place: `rank()` and `size()` go on working,
collectives raise.
"""

from allstep import engine
from allstep.engine import Engine

NOT_INITIALIZED = "Horovod has not been initialized; call hvd.init() first"


def running() -> Engine:
    """The engine between `init()` and `shutdown()`. ValueError outside."""
    current = engine.current()
    if current is None:
        raise ValueError(NOT_INITIALIZED)
    return current


def is_initialized() -> bool:
    """Whether this process called `init()` and not yet `shutdown()`."""
    return engine.current() is not None


def rank() -> int:
    """Our number among all processes, from 0."""
    return running().world.rank


def size() -> int:
    """How many processes there are."""
    return running().world.size


def local_rank() -> int:
    """Our number among the processes of this host."""
    return running().world.local_rank


def local_size() -> int:
    """How many processes this host has."""
    return running().world.local_size


def cross_rank() -> int:
    """The number of this host among those that have a process with our local rank."""
    return running().world.cross_rank


def cross_size() -> int:
    """How many hosts have a process with our local rank."""
    return running().world.cross_size
