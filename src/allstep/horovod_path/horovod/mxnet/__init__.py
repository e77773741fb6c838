"""Horovod's name for allstep.mxnet."""

from allstep.hvd.frameworks import MXNET

from .. import _front_end  # noqa: TID252

__all__ = _front_end.fill(globals(), "allstep.mxnet", MXNET)

from . import compression, functions, mpi_ops  # noqa: F401
