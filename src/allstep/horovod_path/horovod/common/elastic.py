"""Horovod's name for allstep.hvd.elastic."""

import sys

from allstep.hvd import elastic

sys.modules[__name__] = elastic
