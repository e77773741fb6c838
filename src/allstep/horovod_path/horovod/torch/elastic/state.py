"""Horovod's name for allstep.torch.elastic.state."""

import sys

from allstep.torch.elastic import state

sys.modules[__name__] = state
