"""Gradients of all ranks become one: the sum over the samples of all ranks, divided by their number.

Each rank computes gradients of a *sum* over its own samples and passes how many there were. Dividing by the global count afterwards
weights every sample the same, however uneven the shares are; a rank without samples takes part with zeros.

All gradients of one dtype are views of one flat buffer, so that one collective carries them all and nothing is copied to and fro:

    buffer  | conv1.weight | conv1.bias | conv2.weight | ...        p.grad of each parameter is its part of the buffer
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist


class GradientBuckets:
    """Owns the `.grad` of `parameters`: call `zero()` instead of the optimizer's `zero_grad()`."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        by_type: dict[torch.dtype, list[torch.nn.Parameter]] = {}
        for parameter in self.parameters:
            by_type.setdefault(parameter.dtype, []).append(parameter)
        self.buffers = [_flat_gradients(group) for group in by_type.values()]
        self._count = torch.zeros(1, dtype=torch.float64, device=self.buffers[0].device)

    def zero(self) -> None:
        """Before the gradients of a step are accumulated."""
        for buffer in self.buffers:
            buffer.zero_()

    def reduce(self, weight: int) -> int:
        """Turns the sums over this rank's `weight` samples into the mean over all ranks' samples; the number of these."""
        self._count.fill_(weight)
        works = [dist.all_reduce(tensor, async_op=True) for tensor in (self._count, *self.buffers)]
        for work in works:
            work.wait()
        count = round(self._count.item())
        for buffer in self.buffers:
            buffer.div_(max(1, count))
        return count


def broadcast_parameters(module: torch.nn.Module, root: int = 0) -> None:
    """Gives every rank the parameters and buffers that `root` has."""
    for tensor in (*module.parameters(), *module.buffers()):
        packed = tensor.detach().contiguous()  # collectives want plain memory; channels-last weights are not
        dist.broadcast(packed, root)
        tensor.detach().copy_(packed)


def _flat_gradients(parameters: list[torch.nn.Parameter]) -> torch.Tensor:
    """One buffer with a view of it as the gradient of each parameter, in the parameter's own memory format."""
    first = parameters[0]
    buffer = torch.zeros(sum(p.numel() for p in parameters), dtype=first.dtype, device=first.device)
    start = 0
    for parameter in parameters:
        part = buffer[start : start + parameter.numel()]
        parameter.grad = part.as_strided(parameter.size(), parameter.stride(), part.storage_offset())
        start += parameter.numel()
    return buffer
