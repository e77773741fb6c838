"""Horovod's name for allstep.tensorflow.gradient_aggregation."""

import sys
from importlib import import_module

sys.modules[__name__] = import_module("allstep.tensorflow.gradient_aggregation")
