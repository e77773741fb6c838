"""Process groups: how the ranks of a run find each other, and the collectives between them.

Importing this package registers the backend "allstep" with torch.distributed.
"""

from allstep.comm.group.backend import register as _register
from allstep.comm.group.build_memory import Options
from allstep.comm.group.init import init, rejoin, shutdown
from allstep.comm.group.shared_empty import shared_empty
from allstep.comm.join.barrier import barrier
from allstep.comm.timeline.timeline import start_timeline, stop_timeline

__all__ = [
    "Options",
    "barrier",
    "init",
    "rejoin",
    "shared_empty",
    "shutdown",
    "start_timeline",
    "stop_timeline",
]

_register()
