"""Horovod's name for allstep.torch."""

from allstep.torch import *  # noqa: F403
from allstep.torch import __all__ as __all__

from . import compression, functions, mpi_ops, optimizer, sync_batch_norm  # noqa: F401
