"""Horovod's name for allstep.tensorflow."""

from allstep.hvd.frameworks import TENSORFLOW

from .. import _front_end  # noqa: TID252

__all__ = _front_end.fill(globals(), "allstep.tensorflow", TENSORFLOW)

from . import compression, functions, mpi_ops, util  # noqa: F401
from .util import _executing_eagerly  # noqa: F401
