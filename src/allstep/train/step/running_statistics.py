"""Running statistics of batch norms, and buffers like them, kept equal on all workers.

Each worker's norms see the worker's own samples, so their running means and variances would drift
apart, and evaluation and checkpoints would depend on who computes them. After every step they
become their mean over the workers, weighted by samples: all ranks had the same before the step, so
with momentum m

    mean over ranks of  (1 - m) old + m batch_r   =   (1 - m) old + m (mean over ranks of batch_r)

A worker without samples has weight 0 and takes the others'. All of them travel in one small vector:
77 KB for ResNet-18; and with them what else the ranks exchange after a step (`after_step`).

```
first sum     statistics of the norms x weight | weight | further values | for each other buffer: was it changed here?
second sum    those other buffers that were changed anywhere x weight           (only if there are any)
```

A model of the user's may have buffers of its own (a running mean of activations, a code book, a
mask). Most never change, and a mask may hold infinities, whose mean is useless; so each rank looks
at which of them the step has touched, by torch's count of changes in place. Those become their
weighted mean too; whole numbers are rounded, which leaves a counter as it is on all workers that
had samples.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

Place = tuple[nn.Module, str]
"""A module and the name of its buffer: a module may replace the tensor."""
_NONE = torch.empty(0)


class RunningStatistics:
    """The buffers of a model that change in training."""

    def __init__(self, model: nn.Module) -> None:
        self.norms, self.others = _places(model)
        self._seen = [_as_it_is(place) for place in self.others]

    @torch.no_grad()
    def average(self, weight: int, more: Sequence[float] = ()) -> list[float]:
        """Make the statistics equal on all ranks after a step, and return the sums of `more` over
        the ranks.

        weight: samples that this rank had in the step.
        """
        if not (self.norms or self.others or more) or dist.get_world_size() == 1:
            return list(more)
        changed = [
            _has_changed(place, seen) for place, seen in zip(self.others, self._seen, strict=True)
        ]
        sums = _mean_of(self.norms, weight, [weight, *more, *changed])
        total, sums_of_more = sums[0], sums[1 : 1 + len(more)]
        touched = [
            place for place, count in zip(self.others, sums[1 + len(more) :], strict=True) if count
        ]
        if touched and total:
            _mean_of(touched, weight, [weight])
        self._seen = [_as_it_is(place) for place in self.others]
        return sums_of_more


def _places(model: nn.Module) -> tuple[list[Place], list[Place]]:
    """The buffers of norms, and all others; one that several modules share comes once."""
    norms: list[Place] = []
    others: list[Place] = []
    known: set[int] = set()
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if id(buffer) not in known:
                known.add(id(buffer))
                (norms if isinstance(module, _NormBase) else others).append((module, name))
    return norms, others


def _buffer(place: Place) -> Tensor:
    module, name = place
    buffer = module._buffers.get(name)
    return _NONE if buffer is None else buffer


def _as_it_is(place: Place) -> tuple[Tensor, int]:
    """The tensor itself, so that no later one can be taken for it, and torch's count of its
    changes."""
    buffer = _buffer(place)
    return buffer, buffer._version


def _has_changed(place: Place, seen: tuple[Tensor, int]) -> bool:
    """In place, or by another tensor."""
    buffer, version = _as_it_is(place)
    return buffer is not seen[0] or version != seen[1]


def _mean_of(places: Sequence[Place], weight: int, more: Sequence[float]) -> list[float]:
    """Puts the weighted mean over all ranks into the buffers; the sums of `more` over the ranks, of
    which the first is the weight."""
    buffers = [_buffer(place) for place in places]
    mine = [_real(buffer).double().flatten().cpu() for buffer in buffers]
    weighed = [
        each * weight if weight else torch.zeros_like(each) for each in mine
    ]  # 0 x inf is not 0
    total = torch.cat([*weighed, torch.tensor(more, dtype=torch.float64)])
    dist.all_reduce(total)
    flat = total[: len(total) - len(more)]
    sums = [float(each) for each in total[len(flat) :].tolist()]
    if sums[0] > 0 and len(flat):  # a step without any samples leaves all as they are
        _copy(flat / sums[0], [_real(buffer) for buffer in buffers])
    return sums


def _real(buffer: Tensor) -> Tensor:
    return torch.view_as_real(buffer) if buffer.is_complex() else buffer


def _copy(flat: Tensor, buffers: Sequence[Tensor]) -> None:
    pieces = torch.split(flat, [buffer.numel() for buffer in buffers])
    for buffer, piece in zip(buffers, pieces, strict=True):
        if buffer.is_floating_point():
            buffer.copy_(piece.view_as(buffer))
        else:  # num_batches_tracked: the same whole number wherever there were samples
            buffer.copy_(piece.round().view_as(buffer))
