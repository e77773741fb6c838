"""Horovod's name for allstep.hvd.process_sets."""

import sys

from allstep.hvd import process_sets

sys.modules[__name__] = process_sets
