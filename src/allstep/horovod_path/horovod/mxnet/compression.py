"""Horovod's name for allstep.mxnet.compression."""

import sys
from importlib import import_module

sys.modules[__name__] = import_module("allstep.mxnet.compression")
