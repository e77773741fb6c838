"""Horovod's name for `elastic` in allstep's front-end for Keras 3 or Keras 2."""

import sys
from importlib import import_module

from .. import _front_end  # noqa: TID252

sys.modules[__name__] = import_module(f"{_front_end.plain_keras()}.elastic")
