"""Horovod's name for allstep.hvd.basics."""

import sys

from allstep.hvd import basics

sys.modules[__name__] = basics
