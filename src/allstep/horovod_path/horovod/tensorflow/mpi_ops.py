"""Horovod's name for allstep.tensorflow.mpi_ops."""

import sys
from importlib import import_module

sys.modules[__name__] = import_module("allstep.tensorflow.mpi_ops")
