"""Running statistics of batch norms, kept equal on all workers.

Each worker's norms see the worker's own samples, so their running means and variances would drift apart, and evaluation and checkpoints
would depend on who computes them. After every step they become their mean over the workers, weighted by samples: all ranks had the same
before the step, so with momentum m

    mean over ranks of  (1 - m) old + m batch_r   =   (1 - m) old + m (mean over ranks of batch_r)

A worker without samples has weight 0 and takes the others'. All of them travel in one small vector: 77 KB for ResNet-18; and with
them what the workers have to say to each other after each step: how it went, and whether anybody wants to stop.
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
    def average(self, weight: int, more: Sequence[float] = ()) -> list[float]:
        """After a step in which this rank had `weight` samples: equal statistics on all ranks, and the sums of `more` over them."""
        if not (self.buffers or more) or dist.get_world_size() == 1:
            return list(more)
        mine = [(buffer.double() * weight).flatten() for buffer in self.buffers]
        total = torch.cat([*(each.cpu() for each in mine), torch.tensor([weight, *more], dtype=torch.float64)])
        dist.all_reduce(total)
        flat = total[: len(total) - 1 - len(more)]
        count, *sums = (float(each) for each in total[len(flat) :].tolist())
        if count > 0 and len(flat):  # a step without any samples leaves all as they are
            _copy(flat / count, self.buffers)
        return sums


def _copy(flat: torch.Tensor, buffers: Sequence[torch.Tensor]) -> None:
    pieces = torch.split(flat, [buffer.numel() for buffer in buffers])
    for buffer, piece in zip(buffers, pieces, strict=True):
        if buffer.is_floating_point():
            buffer.copy_(piece.view_as(buffer))
        else:  # num_batches_tracked: the same whole number wherever there were samples
            buffer.copy_(piece.round().view_as(buffer))
