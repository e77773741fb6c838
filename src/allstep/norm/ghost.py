"""Ghost batch norm: statistics of small groups of samples, whatever the batch.

Hoffer et al. 2017, https://arxiv.org/abs/1705.08741. The noise in the statistics of a small batch
helps a model to generalize; a large batch loses it. Ghost batch norm normalizes a large batch as if
it were many small ones:

```
worker's batch, ghost=32    | 32 | 32 | 32 | 32 |            each part by its own mean and variance,
                                                             without communication
across_workers, ghost=128   | w0 | w1 | w2 | w3 | w4 | ...   parts are whole workers: the first
                            |<----- one ---->|<----- ...     four, the next four
```

**A size that does not divide** the first training batch is an error that names sizes which do. A
later batch, such as the last one of an epoch, is cut into the nearest number of parts, equal up to
one sample: 100 samples by 32 are three parts of 34, 33 and 33, never a last one of 4, whose
statistics would be useless. No part has fewer than two samples unless the whole batch has.

**A size above the worker's batch** needs `across_workers=True`: all ranks then gather statistics,
as SyncBatchNorm does, and consecutive ranks form a ghost batch; the batch of a rank is not cut.
This cannot be decided from a batch, because ranks with different numbers of samples would decide
differently and wait for each other. Without it such a worker has one part, its whole batch, and a
first batch like that causes a warning.

Running statistics are updated after each ghost batch, as in the paper, and as in a run with small
batches. On several ranks they are those of the rank's own samples (`across_workers`: of all
samples, equal on all ranks).
"""

import warnings
from collections.abc import Sequence
from itertools import accumulate
from typing import cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import batch_norm
from torch.nn.modules.batchnorm import _BatchNorm

from allstep.errors import ConfigError
from allstep.norm.among import Among, ranks_of
from allstep.norm.statistics import (
    Normalize,
    check_values,
    combined,
    gathered,
    own_statistics,
    update_running,
)


class GhostBatchNorm(_BatchNorm):
    """Normalizes (N, C, ...) per channel C over `ghost` samples at a time.

    In evaluation it is torch's BatchNorm. `ghost` is a number of samples, at least 2. It must
    divide the first batch; a later one that it does not divide is cut into the nearest number of
    equal parts: 100 samples by 32 are 34, 33 and 33. `across_workers`: form ghost batches of
    several workers, see the module docstring. `process_group` is a torch ProcessGroup or an
    hvd.ProcessSet that this rank is in (default: all ranks).

    The other arguments are those of torch's BatchNorm: `num_features` is the number of channels C,
    `eps` is added to the variance (default: 1e-5), `momentum` is the weight of a batch in the
    running statistics (default: 0.1), `affine` adds a scale and a shift that are trained, and
    `track_running_stats` keeps running statistics for evaluation (both by default).
    """

    def __init__(
        self,
        num_features: int,
        ghost: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        *,
        across_workers: bool = False,
        process_group: Among = None,
    ) -> None:
        check_ghost(ghost)
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.ghost, self.across_workers, self.process_group = ghost, across_workers, process_group
        self.looked = False

    def extra_repr(self) -> str:
        base = super().extra_repr()  # type: ignore[no-untyped-call]
        return f"{base}, ghost={self.ghost}" + ", across_workers=True" * self.across_workers

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        if not self.training:
            return super().forward(input)
        group = ranks_of(self.process_group) if self.across_workers else None
        if group is not None and group.size() > 1:
            return self._among(input, group)
        return self._alone(input)

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2 or input.shape[1] != self.num_features:
            raise ConfigError(
                f"GhostBatchNorm({self.num_features}) needs (N, {self.num_features}, ...), not"
                f" {list(input.shape)}"
            )

    def _alone(self, input: Tensor) -> Tensor:
        """Normalize part by part; each part is a batch of its own for torch.

        Cut by `split`: the backward of `tensor_split` would make a gradient of the whole batch for
        each part.
        """
        if not len(input):
            return self._nothing(input)
        check_values(input.numel() // self.num_features, input, "GhostBatchNorm", "here")
        self._look(len(input))
        parts = torch.split(input, sizes_of_parts(len(input), self.ghost))
        done = [super(GhostBatchNorm, self).forward(part) for part in parts]
        return done[0] if len(done) == 1 else torch.cat(done)

    def _nothing(self, input: Tensor) -> Tensor:
        """Normalize an empty batch.

        There are no statistics, but weight and bias get zero gradients in the backward.
        """
        any_mean, any_var = input.new_zeros(self.num_features), input.new_ones(self.num_features)
        return batch_norm(
            input, any_mean, any_var, self.weight, self.bias, training=False, eps=self.eps
        )

    def _look(self, num_samples: int) -> None:
        """Check the size of the first batch only: the last one of an epoch may be small."""
        if self.looked:
            return
        if num_samples < self.ghost:
            warnings.warn(
                f"GhostBatchNorm(ghost={self.ghost}): this worker's batch has {num_samples}"
                " samples, so its ghost batches have no more; across_workers=True joins workers to"
                " ghost batches",
                stacklevel=4,
            )
        elif num_samples % self.ghost:
            raise ConfigError(
                f"GhostBatchNorm(ghost={self.ghost}): {self.ghost} does not divide the"
                f" {num_samples} samples of this worker's first batch: take"
                f" ghost={' or '.join(map(str, nearest_divisors(num_samples, self.ghost)))}, or"
                " another batch"
            )
        self.looked = True

    def _among(self, input: Tensor, group: ProcessGroup) -> Tensor:
        """Normalize with ghost batches of consecutive ranks; all ranks know all statistics."""
        with torch.no_grad():
            rows = gathered(own_statistics(input), group)
            samples = [round(values) for values in (rows[:, 2, 0] / _area(input)).tolist()]
            check_values(sum(samples) * _area(input), input, "GhostBatchNorm", "over all ranks")
            parts = parts_of_ranks(samples, self.ghost)
            found = [combined(rows[part]) for part in parts]
            for each in found:
                update_running(self, *each)
        (mine,) = (
            number for number, part in enumerate(parts) if part.start <= group.rank() < part.stop
        )
        mean, squares, count = found[mine]
        how = mean, squares / count, count, self.eps, group, parts[mine]
        arguments = input, self.weight, self.bias, *how
        return cast(Tensor, Normalize.apply(*arguments))  # type: ignore[no-untyped-call]


def nearest_divisors(num_samples: int, ghost: int) -> list[int]:
    """Return the two sizes nearest to `ghost` that divide a batch of `num_samples`.

    Only one if the batch has no other divisor than itself.
    """
    divisors = (size for size in range(2, num_samples + 1) if num_samples % size == 0)
    return sorted(divisors, key=lambda size: abs(size - ghost))[:2]


def num_parts(num_samples: int, ghost: int) -> int:
    """Return the number of equal parts whose size is nearest to `ghost`.

    No part has a single sample, unless the batch has only one.
    """
    return max(1, min(int(num_samples / ghost + 0.5), num_samples // 2))


def sizes_of_parts(num_samples: int, ghost: int) -> list[int]:
    """Return the size of each part, the larger ones first."""
    parts = num_parts(num_samples, ghost)
    size, more = divmod(num_samples, parts)
    return [size + 1] * more + [size] * (parts - more)


def parts_of_ranks(samples: Sequence[int], ghost: int) -> list[slice]:
    """Cut ranks with these samples into runs of consecutive ranks of about `ghost` samples.

    Each run has at least two samples.
    """
    total = sum(samples)
    wanted = num_parts(total, ghost)
    middles = [end - own / 2 for end, own in zip(accumulate(samples), samples, strict=True)]
    numbers = [min(wanted - 1, int(middle * wanted / total)) for middle in middles]
    parts: list[slice] = []
    start = 0
    for rank in range(len(samples)):
        ends = rank + 1 == len(samples) or numbers[rank + 1] != numbers[rank]
        if ends and sum(samples[start : rank + 1]) >= 2:
            parts.append(slice(start, rank + 1))
            start = rank + 1
    # Ranks that are left over at the end belong to the last part.
    last = parts.pop() if parts else slice(0, 0)
    return [*parts, slice(last.start, len(samples))]


def check_ghost(ghost: int) -> None:
    """Raise ConfigError if a ghost batch would have no variance."""
    if ghost < 2:
        raise ConfigError(
            f"ghost={ghost}: a ghost batch needs at least 2 samples, 16 to 128 are usual"
        )


def _area(input: Tensor) -> int:
    """Return the number of values per channel of one sample."""
    return int(torch.Size(input.shape[2:]).numel())
