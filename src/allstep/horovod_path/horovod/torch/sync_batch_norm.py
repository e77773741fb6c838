"""Horovod's name for allstep.torch.sync_batch_norm."""

import sys

from allstep.torch import sync_batch_norm

sys.modules[__name__] = sync_batch_norm
