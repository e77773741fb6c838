"""Horovod's name for allstep.torch.compression."""

import sys

from allstep.torch import compression

sys.modules[__name__] = compression
