"""Horovod's name for allstep.torch.elastic.sampler."""

import sys

from allstep.torch.elastic import sampler

sys.modules[__name__] = sampler
