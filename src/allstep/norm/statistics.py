"""Statistics of samples on several ranks, and normalization with them.

Forward, one all_gather: each rank contributes the mean, the sum of squared differences from it, and
the count of its own samples, per channel. From these every rank computes the same statistics of the
whole batch, by the formula of Chan, Golub and LeVeque (1979): exact for batches of different sizes,
for a rank without samples, and for values far from zero, where a sum of squares would cancel.

Backward, one all_reduce: with y = w * xhat + b, xhat = (x - mean) / std over n samples, and g =
dL/dy,

    dL/dx = w / std * (g - sum(g) / n - xhat * sum(g * xhat) / n)

where the sums are over the samples of all ranks. The passes over the samples are torch's own
kernels: one for both sums (the backward of an evaluation, whose gradients of w and b are these
sums), one for the terms that depend on x (an evaluation with other weights), one to add the terms
that depend on g. The gradients of w and b remain the sums over this rank's own samples, because the
optimizer (or DDP) reduces those of all parameters.

Statistics of some of the ranks (`members`, a slice of them) are computed from the same gathered
rows, and their sums from an all_gather.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.nn.functional import batch_norm
from torch.nn.modules.batchnorm import _BatchNorm

from allstep.errors import ConfigError


def check_values(count: int, input: Tensor, layer: str, where: str) -> None:
    """Raise ConfigError if a channel has fewer than two values, which have no variance."""
    if count < 2:
        raise ConfigError(
            f"{layer} needs more than 1 value per channel in training, got {count} {where} (input"
            f" {list(input.shape)}): give each worker at least 2 samples, leave out a last batch of"
            " one, or use a norm of single samples, such as GroupNorm"
        )


def own_statistics(input: Tensor) -> Tensor:
    """Return (3, C) of this rank's samples: mean, sum of squared differences from it, and count."""
    count = input.numel() // input.shape[1]
    if not count:
        return torch.zeros(3, input.shape[1], dtype=torch.float64, device=input.device)
    # Not var_mean, which takes 5 to 15 times as long: its loops are over single values, these over
    # rows.
    mean, variance = torch.batch_norm_update_stats(input.to(_exact(input.dtype)), None, None, 0.0)
    return torch.stack(
        [
            mean.double(),
            variance.double() * count,
            torch.full_like(mean, count, dtype=torch.float64),
        ]
    )


def combined(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean, sum of squared differences and count over ranks; `rows` is (ranks, 3, C)."""
    means, squares, counts = rows[:, 0], rows[:, 1], rows[:, 2]
    count = counts.sum(0)
    mean = (counts * means).sum(0) / count
    return mean, (squares + counts * (means - mean).square()).sum(0), count


@torch.no_grad()
def update_running(layer: _BatchNorm, mean: Tensor, squares: Tensor, count: Tensor) -> None:
    """Update the running statistics of a layer with those of a batch."""
    if layer.running_mean is None or layer.running_var is None or layer.num_batches_tracked is None:
        return
    layer.num_batches_tracked.add_(1)
    factor = (
        layer.momentum if layer.momentum is not None else 1.0 / float(layer.num_batches_tracked)
    )
    layer.running_mean.lerp_(mean.to(layer.running_mean.dtype), factor)
    layer.running_var.lerp_((squares / (count - 1)).to(layer.running_var.dtype), factor)


class Normalize(torch.autograd.Function):
    """Normalization with given statistics; the backward is described in the module docstring."""

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
        members: slice | None = None,
    ) -> Tensor:
        dtype = _exact(input.dtype)
        mean, variance = mean.to(dtype), variance.to(dtype)
        ctx.save_for_backward(input, weight, mean, variance, count)
        ctx.group, ctx.members, ctx.eps = group, members, eps
        weight, bias = (each if each is None else each.to(dtype) for each in (weight, bias))
        return batch_norm(input, mean, variance, weight, bias, training=False, eps=eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        input, weight, mean, variance, count = ctx.saved_tensors
        dtype = mean.dtype
        values, grad = input.to(dtype), grad.to(dtype)
        sums = _sums(values, grad, mean, variance, ctx.eps)
        grad_bias, grad_weight = (None, None) if weight is None else sums.to(weight.dtype)
        if not ctx.needs_input_grad[0]:
            return None, grad_weight, grad_bias, *[None] * 6
        means = (_summed(sums, ctx.group, ctx.members) / count).to(dtype)
        scale = (variance + ctx.eps).rsqrt() * (1.0 if weight is None else weight.to(dtype))
        of_input = batch_norm(
            values,
            mean,
            variance,
            -scale * means[1],
            -scale * means[0],
            training=False,
            eps=ctx.eps,
        )
        # The shape of a vector over channels that broadcasts against (N, C, ...).
        per_channel = [-1, *[1] * (input.dim() - 2)]
        grad_input = of_input.addcmul_(grad, scale.view(per_channel))
        return grad_input.to(input.dtype), grad_weight, grad_bias, *[None] * 6


def _sums(values: Tensor, grad: Tensor, mean: Tensor, variance: Tensor, eps: float) -> Tensor:
    """Return (2, C): the sums of g and of g * xhat over this rank's samples."""
    if not len(values):
        return torch.zeros(2, len(mean), dtype=mean.dtype, device=mean.device)
    # The gradients of weight and bias, not of the input.
    wanted = [False, True, True]
    _, of_weight, of_bias = torch.ops.aten.native_batch_norm_backward(
        grad, values, None, mean, variance, None, None, False, eps, wanted
    )
    return torch.stack([of_bias, of_weight])


def gathered(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """Return the tensors of all ranks, stacked by rank."""
    rows = tensor.new_empty(group.size(), *tensor.shape)
    group.allgather([list(rows)], [tensor]).wait()
    return rows


def _summed(tensor: Tensor, group: ProcessGroup, members: slice | None) -> Tensor:
    """Return the sum over the ranks `members`, or over all, in float64."""
    total = tensor.to(torch.float64, copy=True)
    if members is not None:
        return gathered(total, group)[members].sum(0)
    group.allreduce([total]).wait()
    return total


def _exact(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which statistics of values of `dtype` are computed."""
    return dtype if dtype.itemsize >= 4 else torch.float32
