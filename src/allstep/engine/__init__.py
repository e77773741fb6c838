"""Named asynchronous operations: ranks ask for them in any order, and each is carried out when all
ranks have asked for it.

    running = engine.start()
    handle = running.enqueue(Request(Kind.ALLREDUCE, "allreduce.grad", tensor))
    average = running.synchronize(handle)

Read on in this order: `request` (what is asked), `coordinator` (when it is done, and in which
order), `mismatch` (whether the ranks ask for the same), `board` (how messages travel between
ranks), `executor` (how it is done), `engine` (what callers see). The engine's parts: `pending`
(requests and handles), `driver` (the progress loop), `dispatch` (does what the coordinator says),
`stop`.
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
