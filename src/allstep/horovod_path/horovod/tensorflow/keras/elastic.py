"""Horovod's name for `elastic` in allstep's front-end for the Keras that TensorFlow uses."""

import sys
from importlib import import_module

from ... import _front_end  # noqa: TID252

sys.modules[__name__] = import_module(_front_end.tensorflows_keras("elastic"))
