"""Named asynchronous operations. Ranks request them in any order; an operation runs once every rank
of its process set has requested it.

    running = engine.start()
    handle = running.enqueue(Request(Kind.ALLREDUCE, "allreduce.grad", tensor))
    average = running.synchronize(handle)

Reading order:

    request       what a rank requests
    coordinator   when an operation runs, and in which order
    mismatch      whether the ranks request the same operation
    board         how messages travel between ranks
    executor      how an operation is computed
    engine        the interface for callers

The engine consists of `pending` (requests and handles), `driver` (the progress loop), `dispatch`
(executes the coordinator's messages) and `stop`.
"""

from allstep.engine.engine import Engine
from allstep.engine.hooks import Hooks
from allstep.engine.request import DuplicateName, EngineStopped, Kind, Op, Request
from allstep.engine.start import current, start

__all__ = [
    "DuplicateName",
    "Engine",
    "EngineStopped",
    "Hooks",
    "Kind",
    "Op",
    "Request",
    "current",
    "start",
]
