"""Running statistics of batch norms, and other buffers, kept equal on all workers.

The norms of a worker see only the worker's own samples, so their running means and variances would
drift apart, and evaluation and checkpoints would depend on the rank that computes them. After every
step each statistic is replaced by its mean over the workers, weighted by samples. All ranks had the
same value before the step, so with momentum m

    mean over ranks of  (1 - m) old + m batch_r   =   (1 - m) old + m (mean over ranks of batch_r)

A worker without samples has weight 0 and receives the mean of the others. All statistics are
reduced in one small vector (77 KB for ResNet-18), together with the other values that the ranks
exchange after a step (`after_step`).

```
first sum     statistics of the norms x weight | weight | further values | for each other buffer:
              whether this rank changed it
second sum    the other buffers that any rank changed x weight (only if there are any)
```

A user's model may have other buffers (a running mean of activations, a code book, a mask). Most of
them never change, and a mask may contain infinities, whose mean is useless. So each rank detects
which buffers the step has changed, by torch's version counter of a tensor, and only those are
replaced by their weighted mean. Integers are rounded; a counter keeps its value, because it is the
same on all workers that had samples.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

Place = tuple[nn.Module, str]
"""A module and the name of its buffer; not the tensor, which the module may replace."""
AddUp = Callable[[Tensor], object]
_NONE = torch.empty(0)


class RunningStatistics:
    """The buffers of a model that change in training.

    `add_up` adds a vector over the ranks in place; None: the default process group. `keeps` allows
    `restore`: after each update (`keep`) the values are kept, at the cost of a copy
    of the buffers that are not of norms.
    """

    def __init__(self, model: nn.Module, keeps: bool = False, add_up: AddUp | None = None) -> None:
        self._add_up = dist.all_reduce if add_up is None else add_up
        self.norms, self.others = _places(model)
        self._seen = [_as_it_is(place) for place in self.others]
        # The values to return to: of all norms in one vector, of each other buffer a copy.
        self._kept_norms = _flat(self.norms) if keeps else None
        self._kept_others = [_buffer(place).clone() for place in self.others] if keeps else []
        # What the last `average` changed: the mean of the norms, and which other buffers.
        self._means: Tensor | None = None
        self._touched: Sequence[bool] = ()

    @torch.no_grad()
    def average(self, weight: int, more: Sequence[float] = ()) -> list[float]:
        """Make the statistics equal on all ranks after a step. Return the sums of `more` over them.

        `weight` is the number of samples that this rank had in the step, `more` are further values
        to add over the ranks. No buffer changes before the last collective.
        """
        if not (self.norms or self.others or more) or _is_alone():
            # Without other ranks a step does not fail, so there is nothing to return to.
            self._kept_norms = None
            return list(more)
        changed = [
            _has_changed(place, seen) for place, seen in zip(self.others, self._seen, strict=True)
        ]
        means, sums = self._mean_of(self.norms, weight, [weight, *more, *changed])
        total, sums_of_more = sums[0], sums[1 : 1 + len(more)]
        touched = [bool(count) for count in sums[1 + len(more) :]]
        if any(touched) and total:
            places = [place for place, is_it in zip(self.others, touched, strict=True) if is_it]
            _copy(self._mean_of(places, weight, [weight])[0], places)
        # A step without any samples does not change the buffers.
        if total and len(means):
            _copy(means, self.norms)
        self._note(means if total else None, touched)
        return sums_of_more

    @torch.no_grad()
    def keep(self) -> None:
        """Keep the values of the last `average` as those to return to; the step is whole now."""
        if self._kept_norms is None:
            return
        if self._means is not None:
            self._kept_norms = self._means
        for number, is_touched in enumerate(self._touched):
            if is_touched:
                self._kept_others[number] = _buffer(self.others[number]).clone()
        self._means, self._touched = None, ()

    @torch.no_grad()
    def restore(self) -> None:
        """Return to the values after the last whole step; needs `keeps`."""
        if self._kept_norms is None:
            return
        _copy(self._kept_norms, self.norms)
        for (module, name), kept in zip(self.others, self._kept_others, strict=True):
            buffer = _buffer((module, name))
            if buffer.shape == kept.shape and buffer.dtype == kept.dtype:
                buffer.copy_(kept)
            else:
                module._buffers[name] = kept.clone()
        self._note(None, ())

    def _mean_of(
        self, places: Sequence[Place], weight: int, more: Sequence[float]
    ) -> tuple[Tensor, list[float]]:
        """Return the weighted mean of the buffers over all ranks, and the sums of `more`.

        The first value of `more` must be the weight. Without any weight the mean has no meaning.
        """
        mine = _flat(places)
        # Not `mine * weight` for weight 0: 0 x inf is NaN.
        weighed = mine * weight if weight else torch.zeros_like(mine)
        total = torch.cat([weighed, torch.tensor(more, dtype=torch.float64)])
        self._add_up(total)
        sums = [float(each) for each in total[len(mine) :].tolist()]
        return total[: len(mine)] / sums[0], sums

    def _note(self, means: Tensor | None, touched: Sequence[bool]) -> None:
        """Remember the present values, to detect later changes; and what `keep` must keep."""
        self._seen = [_as_it_is(place) for place in self.others]
        self._means, self._touched = means, touched


class PartyStatistics:
    """The buffers of several parties in one process, for a replay of their steps.

    Each party begins with the present buffers of `model`, and has the model's while it steps.
    """

    def __init__(self, model: nn.Module) -> None:
        norms, others = _places(model)
        self._places = [*norms, *others]
        self._begun = [_buffer(place).clone() for place in self._places]
        self._parties: dict[int, list[Tensor]] = {}
        self._present: int | None = None

    @torch.no_grad()
    def enter(self, party: int) -> None:
        """Let the model have the buffers of `party`."""
        if party == self._present:
            return
        self._leave()
        self._present = party
        self._set(self._parties.get(party, self._begun))

    def _leave(self) -> None:
        if self._present is not None:
            self._parties[self._present] = [_buffer(place).clone() for place in self._places]

    def _set(self, values: Sequence[Tensor]) -> None:
        for place, value in zip(self._places, values, strict=True):
            _buffer(place).copy_(value)

    @torch.no_grad()
    def average(self, samples: Mapping[int, int]) -> None:
        """Let the model have the mean over the parties, as `RunningStatistics` computes it.

        `samples` is the number of samples of each party.
        """
        self._leave()
        self._present = None
        total = float(sum(samples.values()))
        sums = torch.zeros_like(_flat(self._places))
        for party, count in sorted(samples.items()):
            if count:
                self._set(self._parties.get(party, self._begun))
                sums += _flat(self._places) * count
        changed = [
            number
            for number, begun in enumerate(self._begun)
            if any(not torch.equal(each[number], begun) for each in self._parties.values())
        ]
        means = torch.split(sums / total, [_real(each).numel() for each in self._begun])
        self._set(self._begun)
        places = [self._places[number] for number in changed]
        if places:
            _copy(torch.cat([means[number] for number in changed]), places)


def _is_alone() -> bool:
    return not dist.is_initialized() or dist.get_world_size() == 1


def _places(model: nn.Module) -> tuple[list[Place], list[Place]]:
    """Return the buffers of norms, and all others; a buffer shared by modules occurs once."""
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
    """Return the tensor and its version.

    The reference keeps the tensor alive, so that no later tensor can have the same identity.
    """
    buffer = _buffer(place)
    return buffer, buffer._version


def _has_changed(place: Place, seen: tuple[Tensor, int]) -> bool:
    """Return whether a buffer was changed in place or replaced by another tensor."""
    buffer, version = _as_it_is(place)
    return buffer is not seen[0] or version != seen[1]


def _flat(places: Sequence[Place]) -> Tensor:
    """Return the values of buffers as one vector."""
    values = [_real(_buffer(place)).double().flatten().cpu() for place in places]
    return torch.cat([*values, torch.empty(0, dtype=torch.float64)])


def _real(buffer: Tensor) -> Tensor:
    return torch.view_as_real(buffer) if buffer.is_complex() else buffer


def _copy(flat: Tensor, places: Sequence[Place]) -> None:
    buffers = [_real(_buffer(place)) for place in places]
    values = torch.split(flat, [buffer.numel() for buffer in buffers])
    for buffer, value in zip(buffers, values, strict=True):
        # An integer, such as num_batches_tracked, is the same on all ranks that had samples.
        exact = value if buffer.is_floating_point() else value.round()
        buffer.copy_(exact.view_as(buffer))
