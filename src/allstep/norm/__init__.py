"""Batch norms that know of workers: `SyncBatchNorm` over the samples of all, `GhostBatchNorm` over
few samples at a time.

A batch norm computes with the samples of one worker, so its noise depends on how many workers there
are. `sync` takes that away: N workers normalize as one would. `ghost` fixes it: statistics of, say,
32 samples, whatever the batch, which large batches need to generalise as small ones do. `convert`
puts either in place of the batch norms of a model.
"""

from allstep.norm.convert import convert
from allstep.norm.ghost import GhostBatchNorm
from allstep.norm.sync import SyncBatchNorm

__all__ = ["GhostBatchNorm", "SyncBatchNorm", "convert"]
