"""Horovod's name for allstep.mxnet.mpi_ops."""

import sys
from importlib import import_module

sys.modules[__name__] = import_module("allstep.mxnet.mpi_ops")
