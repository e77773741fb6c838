"""Horovod's name for allstep.tensorflow.sync_batch_norm."""

import sys
from importlib import import_module

sys.modules[__name__] = import_module("allstep.tensorflow.sync_batch_norm")
