"""Ranks that work together: how they meet, and what they compute in common.

Importing this package makes the backend "allstep" known to torch.distributed.
"""

from allstep.comm.backend import register as _register
from allstep.comm.barrier import barrier
from allstep.comm.host import Options
from allstep.comm.shared import shared_empty
from allstep.comm.start import init, shutdown
from allstep.comm.timeline import start_timeline, stop_timeline

__all__ = ["Options", "barrier", "init", "shared_empty", "shutdown", "start_timeline", "stop_timeline"]

_register()
