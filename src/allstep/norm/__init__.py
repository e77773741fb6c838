"""Batch norms for several workers: `SyncBatchNorm` over all samples, `GhostBatchNorm` over few.

A plain batch norm computes with the samples of one worker, so its noise depends on the number of
workers. `SyncBatchNorm` removes that dependence: N workers normalize like one worker with the whole
batch. `GhostBatchNorm` fixes the number of samples: statistics of, for example, 32 samples,
whatever the batch, which large batches need to generalize as small ones do. `convert` replaces the
batch norms of a model by either.
"""

from allstep.norm.convert import convert
from allstep.norm.ghost import GhostBatchNorm
from allstep.norm.sync import SyncBatchNorm

__all__ = ["GhostBatchNorm", "SyncBatchNorm", "convert"]
