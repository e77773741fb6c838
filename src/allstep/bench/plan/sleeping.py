"""A model whose layers sleep instead of computing: `model: allstep.bench.plan.sleeping:model`.

Parameters, gradients, hooks, buckets, optimizer and network are real; only the arithmetic of the
layers is missing. So many workers share a few cores without slowing each other down, and what is
left of a step is what a planner has to predict.

```
forward     each layer sleeps for its forward time and returns its input
backward    each layer sleeps for its backward time and returns a gradient of its size
```

A layer is (bytes of its weights, forward seconds, backward seconds), in forward order;
`configurations.sleeping_layers` makes layers from any profile.
"""

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

_ELEMENT = 4
"""Bytes of an element of the weights."""
LAYERS = ((1_000_000, 0.02, 0.05),) * 4
"""The layers of `model` by default: 4 MB, 280 ms a step."""


def sleep_until(moment: float) -> None:
    """Sleep until `moment` of `time.perf_counter`.

    A sleep may end early or late by the timer's slack; sleeping for durations would add it up.
    """
    while (left := moment - time.perf_counter()) > 0:
        time.sleep(left)


class _Sleep(torch.autograd.Function):
    """Returns its input, and a gradient of the weights whose elements are all the same."""

    @staticmethod
    def forward(ctx: Any, data: Tensor, weight: Tensor, forward: float, backward: float) -> Tensor:
        moment = time.perf_counter() + forward
        ctx.weight, ctx.seconds = weight, backward
        out = data.clone()
        sleep_until(moment)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        moment = time.perf_counter() + ctx.seconds
        own = torch.full_like(ctx.weight, gradients[0].flatten()[0].item())
        sleep_until(moment)
        return gradients[0], own, None, None


class SleepingLayer(nn.Module):
    """A layer of `nbytes` of weights that takes `forward` and `backward` seconds.

    samples: the number of samples that takes so long, other numbers in proportion; None: any
    number takes as long.
    """

    def __init__(
        self, nbytes: int, forward: float, backward: float, samples: int | None = None
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(max(1, nbytes // _ELEMENT)))
        self.seconds, self.samples = (forward, backward), samples

    def forward(self, data: Tensor) -> Tensor:
        """Sleep, and return `data`."""
        factor = 1.0 if self.samples is None else len(data) / self.samples
        forward, backward = (factor * each for each in self.seconds)
        slept: Tensor = _Sleep.apply(data, self.weight, forward, backward)  # type: ignore[no-untyped-call]
        return slept


def sleeping_layers(
    layers: Sequence[Sequence[float]], slow: float = 1.0, samples: int | None = None
) -> nn.Sequential:
    """Return `layers` (bytes, forward seconds, backward seconds) that take `slow` times as long."""
    made = (
        SleepingLayer(int(nbytes), slow * forward, slow * backward, samples)
        for nbytes, forward, backward in layers
    )
    return nn.Sequential(*made)


def model(
    num_classes: int,
    channels: int,
    layers: Sequence[Sequence[float]] = LAYERS,
    samples: int | None = None,
) -> nn.Module:
    """Return a classifier that sleeps, for `allstep train`.

    One small linear layer computes logits, so that the loss and its gradients are real. layers:
    bytes, forward seconds and backward seconds of each layer, of a share of `samples` samples
    (None: of any share).
    """
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes))
    return nn.Sequential(head, sleeping_layers(layers, samples=samples))
