"""Horovod's name for allstep.hvd.exceptions."""

import sys

from allstep.hvd import exceptions

sys.modules[__name__] = exceptions
