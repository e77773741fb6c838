"""Horovod's name for allstep.tensorflow."""

from allstep.hvd.frameworks import TENSORFLOW

from .. import _front_end  # noqa: TID252

__all__ = _front_end.fill(globals(), "allstep.tensorflow", TENSORFLOW)

from tensorflow.compat.v1.train import Optimizer as _LegacyOptimizer  # noqa: F401

# Other projects import these from here: GRACE, ElasticDL, and copies of Horovod's tests.
from allstep.tensorflow.mpi_ops import _allreduce  # noqa: F401

from . import compression, functions, mpi_ops, util  # noqa: F401
from .util import _executing_eagerly  # noqa: F401
