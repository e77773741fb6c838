"""Horovod's name for allstep.keras.callbacks."""

import sys
from importlib import import_module

sys.modules[__name__] = import_module("allstep.keras.callbacks")
