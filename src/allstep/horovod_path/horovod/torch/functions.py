"""Horovod's name for allstep.torch.functions."""

import sys

from allstep.torch import functions

sys.modules[__name__] = functions
