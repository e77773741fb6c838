"""Running statistics of batch norms, kept equal on all workers.

Each worker's norms see the worker's own samples, so their running means and variances would drift apart, and evaluation and checkpoints
would depend on who computes them. After every step they become their mean over the workers, weighted by samples: all ranks had the same
before the step, so with momentum m

    mean over ranks of  (1 - m) old + m batch_r   =   (1 - m) old + m (mean over ranks of batch_r)

A worker without samples has weight 0 and takes the others'. All of them travel in one small vector: 77 KB for ResNet-18.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _NormBase


class Statistics:
    """The running statistics of the norms in a net."""

    def __init__(self, net: nn.Module) -> None:
        norms = [layer for layer in net.modules() if isinstance(layer, _NormBase)]
        self.buffers = [buffer for norm in norms for buffer in norm.buffers(recurse=False)]

    @torch.no_grad()
    def average(self, weight: int) -> None:
        """After a step in which this rank had `weight` samples; a collective, unless the net has no such norms."""
        if not self.buffers or dist.get_world_size() == 1:
            return
        mine = torch.cat([buffer.double().flatten() for buffer in self.buffers])
        total = torch.cat([mine * weight, mine.new_full((1,), weight)])
        dist.all_reduce(total)
        if total[-1] > 0:  # a step without any samples leaves all as they are
            _copy(total[:-1] / total[-1], self.buffers)


def _copy(flat: torch.Tensor, buffers: Sequence[torch.Tensor]) -> None:
    pieces = torch.split(flat, [buffer.numel() for buffer in buffers])
    for buffer, piece in zip(buffers, pieces, strict=True):
        if buffer.is_floating_point():
            buffer.copy_(piece.view_as(buffer))
        else:  # num_batches_tracked: the same whole number wherever there were samples
            buffer.copy_(piece.round().view_as(buffer))
