"""Batch normalisation over the samples of all ranks, so that N workers normalise as one worker with the whole batch would.

Forward, one all_gather: each rank tells the mean, the sum of squared deviations from it, and the count of its own samples, per channel.
From these every rank computes the same statistics of the whole batch, by the formula of Chan, Golub and LeVeque (1979): exact for batches
of different sizes, for a rank without any sample, and for values far from zero, where a sum of squares would cancel.

Backward, one all_reduce: with y = w * xhat + b, xhat = (x - mean) / std over n samples, and g = dL/dy,

    dL/dx = w / std * (g - sum(g) / n - xhat * sum(g * xhat) / n)

where the sums go over the samples of all ranks. The gradients of w and b are left as the sums of this rank's own samples, because the
optimizer (or DDP) reduces those of all parameters.

Ranks without samples must go forward and backward too, with an empty batch.
"""

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.nn.functional import batch_norm
from torch.nn.modules.batchnorm import _BatchNorm

from allstep.comm import engine


class SyncBatchNorm(_BatchNorm):
    """Normalises (N, C, ...) per channel C over the batches of all ranks. In evaluation, and alone, it is torch's BatchNorm.

    process_group: among whom; None is all ranks.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        *,
        process_group: ProcessGroup | None = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.process_group = process_group

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        group = _group(self.process_group) if self.training else None
        if group is None or group.size() == 1:
            return super().forward(input)
        mean, squares, count = _statistics(input, group)
        self._update_running(mean, squares, count)
        how = mean, squares / count, count, self.eps, group
        return cast(Tensor, _Normalise.apply(input, self.weight, self.bias, *how))  # type: ignore[no-untyped-call]

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2 or input.shape[1] != self.num_features:
            raise ValueError(
                f"SyncBatchNorm({self.num_features}) needs (N, {self.num_features}, ...), not {list(input.shape)}"
            )

    @torch.no_grad()
    def _update_running(self, mean: Tensor, squares: Tensor, count: Tensor) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        factor = self.momentum if self.momentum is not None else 1.0 / float(self.num_batches_tracked)
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
        self.running_var.lerp_((squares / (count - 1)).to(self.running_var.dtype), factor)


def _group(chosen: ProcessGroup | None) -> ProcessGroup | None:
    """Among whom: the user's group; all ranks of the engine, when hvd runs; torch's default group; None for a process alone."""
    if chosen is not None:
        return chosen
    running = engine.current()
    if running is not None:
        return running.group("norm", 0)
    return dist.group.WORLD  # None before init_process_group


@torch.no_grad()
def _statistics(input: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and sum of squared deviations of each channel over all ranks, and the count they are over; all in float64."""
    rows = _gathered(_own_statistics(input), group)
    means, squares, counts = rows[:, 0], rows[:, 1], rows[:, 2]
    count = counts.sum(0)
    if input.numel() <= input.shape[1]:  # at most one value a channel here: only then can there be too few in all
        _check_count(int(count[0]), input)
    mean = (counts * means).sum(0) / count
    return mean, (squares + counts * (means - mean).square()).sum(0), count


def _own_statistics(input: Tensor) -> Tensor:
    """Of this rank's samples: (3, C), the rows are mean, sum of squared deviations, and count."""
    count = input.numel() // input.shape[1]
    if not count:
        return torch.zeros(3, input.shape[1], dtype=torch.float64, device=input.device)
    variance, mean = torch.var_mean(input.to(_exact(input.dtype)), _all_but_channels(input), correction=0)
    return torch.stack([mean.double(), variance.double() * count, torch.full_like(mean, count, dtype=torch.float64)])


def _check_count(count: int, input: Tensor) -> None:
    if count < 2:
        raise ValueError(
            f"SyncBatchNorm needs more than 1 value per channel in training, got {count} over all ranks "
            f"(input here {list(input.shape)})"
        )


class _Normalise(torch.autograd.Function):
    """Forward with statistics that are given; backward as in the module's docstring."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        variance: Tensor,
        count: Tensor,
        eps: float,
        group: ProcessGroup,
    ) -> Tensor:
        dtype = _exact(input.dtype)
        mean, variance = mean.to(dtype), variance.to(dtype)
        ctx.save_for_backward(input, weight, mean, (variance + eps).rsqrt(), count)
        ctx.group = group
        weight, bias = (each if each is None else each.to(dtype) for each in (weight, bias))
        return batch_norm(input, mean, variance, weight, bias, training=False, eps=eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        input, weight, mean, inverse_std, count = ctx.saved_tensors
        dtype, dims = mean.dtype, _all_but_channels(input)
        beside = [-1, *[1] * (input.dim() - 2)]  # a vector over channels, as it lies beside (N, C, ...)
        grad = grad.to(dtype)
        xhat = (input.to(dtype) - mean.view(beside)) * inverse_std.view(beside)
        sums = torch.stack([grad.sum(dims), (grad * xhat).sum(dims)])
        grad_bias, grad_weight = (None, None) if weight is None else sums.to(weight.dtype)
        if not ctx.needs_input_grad[0]:
            return None, grad_weight, grad_bias, *[None] * 5
        means = (_summed(sums, ctx.group) / count).to(dtype)
        scale = inverse_std if weight is None else inverse_std * weight.to(dtype)
        grad_input = (grad - means[0].view(beside) - xhat * means[1].view(beside)) * scale.view(beside)
        return grad_input.to(input.dtype), grad_weight, grad_bias, *[None] * 5


def _gathered(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """The tensors of all ranks, stacked by rank."""
    rows = tensor.new_empty(group.size(), *tensor.shape)
    group.allgather([list(rows)], [tensor]).wait()
    return rows


def _summed(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """The sum over all ranks, in float64."""
    total = tensor.to(torch.float64, copy=True)
    group.allreduce([total]).wait()
    return total


def _exact(dtype: torch.dtype) -> torch.dtype:
    """What statistics of this type are computed in."""
    return dtype if dtype.itemsize >= 4 else torch.float32


def _all_but_channels(input: Tensor) -> list[int]:
    return [dim for dim in range(input.dim()) if dim != 1]
