"""Batch normalization over the samples of all ranks.

N workers normalize like one worker with the whole batch. It takes one collective forward and one
backward; the arithmetic is in `statistics`. Ranks without samples must run forward and backward
too, with an empty batch.
"""

from typing import cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
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


class SyncBatchNorm(_BatchNorm):
    """Normalizes (N, C, ...) per channel C over the batches of all ranks.

    In evaluation, and in a group of one rank, it is torch's BatchNorm. `process_group` is a torch
    ProcessGroup or an hvd.ProcessSet that this rank is in (default: all ranks). A single value per
    channel over all ranks has no variance: in training that raises a ConfigError on each rank.

    The other arguments are those of torch's BatchNorm: `num_features` is the number of channels C,
    `eps` is added to the variance (default: 1e-5), `momentum` is the weight of a batch in the
    running statistics (default: 0.1), `affine` adds a scale and a shift that are trained, and
    `track_running_stats` keeps running statistics for evaluation (both by default).
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        *,
        process_group: Among = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.process_group = process_group

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        group = ranks_of(self.process_group) if self.training else None
        if group is None or group.size() == 1:
            return self._alone(input)
        mean, squares, count = _statistics(input, group)
        update_running(self, mean, squares, count)
        how = mean, squares / count, count, self.eps, group
        arguments = input, self.weight, self.bias, *how
        return cast(Tensor, Normalize.apply(*arguments))  # type: ignore[no-untyped-call]

    def _alone(self, input: Tensor) -> Tensor:
        count = input.numel() // self.num_features
        # torch accepts an empty batch and changes nothing.
        if self.training and count:
            check_values(count, input, "SyncBatchNorm", "here")
        return super().forward(input)

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2 or input.shape[1] != self.num_features:
            raise ConfigError(
                f"SyncBatchNorm({self.num_features}) needs (N, {self.num_features}, ...), not"
                f" {list(input.shape)}"
            )


@torch.no_grad()
def _statistics(input: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean, sum of squared differences and count per channel over all ranks, in float64."""
    mean, squares, count = combined(gathered(own_statistics(input), group))
    # Only with at most one value per channel on this rank can there be too few in total.
    if input.numel() <= input.shape[1]:
        check_values(int(count[0]), input, "SyncBatchNorm", "over all ranks")
    return mean, squares, count
