"""Batch normalization over the batches of all ranks, under Horovod's module name.

The class is `allstep.norm`'s, and works on CPU too.
"""

from allstep.norm import SyncBatchNorm

__all__ = ["SyncBatchNorm"]
