"""A serial model of averaging: parties that step alone, one after the other, in one process.

It is the yardstick for `local:H` and `diloco:H`: plain torch, no code of allstep.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

Shares = Sequence[Sequence[tuple[Tensor, Tensor]]]
"""By step, the data and targets of each party; empty ones for a party without samples."""


def serial_model(
    nets: Sequence[nn.Module],
    make: Callable[[Sequence[Tensor]], torch.optim.Optimizer],
    shares: Shares,
    every: int,
    outer: Callable[[Sequence[Tensor]], torch.optim.Optimizer],
) -> list[Tensor]:
    """Train one network per party and return the common parameters after the last average."""
    inner = [make(list(net.parameters())) for net in nets]
    common = [nn.Parameter(p.detach().clone()) for p in nets[0].parameters()]
    outer_optimizer, samples = outer(common), [0] * len(nets)
    for number, step in enumerate(shares, 1):
        for party, (data, target) in enumerate(step):
            if len(data):
                inner[party].zero_grad()
                nn.functional.mse_loss(nets[party](data), target).backward()
                inner[party].step()
                samples[party] += len(data)
        if number % every == 0:
            for i, each in enumerate(common):
                own = zip(nets, samples, strict=True)
                mean = sum(list(net.parameters())[i].detach() * n for net, n in own) / sum(samples)
                each.grad = each.detach() - mean  # the pseudo-gradient: before minus after
            outer_optimizer.step()
            for net in nets:
                for p, each in zip(net.parameters(), common, strict=True):
                    p.data.copy_(each.data)
            samples = [0] * len(nets)
    return [each.detach() for each in common]
