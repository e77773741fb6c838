"""Horovod's name for allstep.torch.optimizer."""

import sys

from allstep.torch import optimizer

sys.modules[__name__] = optimizer
