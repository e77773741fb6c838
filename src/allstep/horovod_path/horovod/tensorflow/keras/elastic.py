"""Horovod's name for allstep.tensorflow.keras.elastic."""

import sys
from importlib import import_module

import_module("allstep.tensorflow.keras")
sys.modules[__name__] = sys.modules["allstep.tensorflow.keras.elastic"]
