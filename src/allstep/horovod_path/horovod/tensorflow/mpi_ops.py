"""Horovod's name for allstep.tensorflow.mpi_ops, where Horovod also has the rest of its API.

Scripts write `hvd.mpi_ops.Adasum` and `from horovod.tensorflow.mpi_ops import rank`.
"""

from allstep.hvd import basics as _basics  # noqa: F401
from allstep.hvd.frameworks import TENSORFLOW

from .. import _front_end  # noqa: TID252

__all__ = _front_end.fill(globals(), "allstep.tensorflow", TENSORFLOW)

from allstep.tensorflow.mpi_ops import (  # noqa: F401
    _allreduce,
    _grouped_allreduce,
    _grouped_reducescatter,
    _reducescatter,
    handle_average_backwards_compatibility,
)
