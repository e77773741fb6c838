"""Batch normalisation over the batches of all ranks, where Horovod has it.

The class is `allstep.norm`'s, and works on CPU too.
"""

from allstep.norm import SyncBatchNorm

__all__ = ["SyncBatchNorm"]
