"""Horovod's name for allstep.torch.mpi_ops."""

import sys

from allstep.torch import mpi_ops

sys.modules[__name__] = mpi_ops
