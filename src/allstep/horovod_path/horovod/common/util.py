"""Horovod's name for allstep.hvd.util."""

import sys

from allstep.hvd import util

sys.modules[__name__] = util
