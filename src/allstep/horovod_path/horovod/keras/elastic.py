"""Horovod's name for allstep.keras.elastic."""

import sys
from importlib import import_module

sys.modules[__name__] = import_module("allstep.keras.elastic")
