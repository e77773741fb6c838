"""Horovod's name for allstep.torch.elastic."""

from allstep.torch.elastic import *  # noqa: F403
from allstep.torch.elastic import __all__ as __all__

from . import sampler, state  # noqa: F401
