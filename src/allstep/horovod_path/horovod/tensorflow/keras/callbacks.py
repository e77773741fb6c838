"""Horovod's name for allstep.tensorflow.keras.callbacks."""

import sys
from importlib import import_module

import_module("allstep.tensorflow.keras")
sys.modules[__name__] = sys.modules["allstep.tensorflow.keras.callbacks"]
