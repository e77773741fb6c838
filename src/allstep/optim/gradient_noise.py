"""Gaussian noise on the gradients, less of it step by step (Neelakantan et al. 2015,
https://arxiv.org/abs/1511.06807).

```
g = g + N(0, variance)        variance = eta / (1 + t)^gamma at step t
```

Large batches take noise away from the gradient that helped to leave sharp minima; this puts some
back. It helps deep models that are hard to start with, and does not replace a small batch, whose
noise has the shape of the data's.

All ranks must add the same noise, to the gradient that they have agreed on, or their weights part.
So the noise is drawn from (seed, samples seen), not from the rank, and after `synchronize()` where
the optimizer has one (`DistributedOptimizer`).
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from allstep.errors import ConfigError
from allstep.optim.draws import generator

_OWN = {"optimizer", "batch", "seed", "eta", "gamma"}


class NoisyGradients:
    """Wraps an optimizer; all but `step` is the optimizer's own.

        optimizer = NoisyGradients(SGD(...), batch=1024, seed=0)
        optimizer.step(seen)

    batch: samples of a step, so that the schedule counts samples. eta: 0.01, 0.3 and 1.0 are the
    paper's choices.
    """

    def __init__(
        self, optimizer: Optimizer, *, batch: int, seed: int, eta: float = 0.3, gamma: float = 0.55
    ) -> None:
        if batch < 1 or eta < 0 or gamma < 0:
            raise ConfigError(
                f"gradient noise: batch {batch} must be at least 1, eta {eta} and gamma {gamma} not"
                " below 0"
            )
        self.optimizer = optimizer
        self.batch, self.seed, self.eta, self.gamma = batch, seed, eta, gamma

    def variance(self, seen: int) -> float:
        """Of the noise in the step after `seen` samples."""
        return float(self.eta / (1 + seen / self.batch) ** self.gamma)

    def step(self, seen: int, closure: Callable[[], Any] | None = None) -> Any:
        """The optimizer's step with noise on its gradients. seen: samples before it.

        The closure is called once, before the noise.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with self._synchronized():
            parameters = (
                parameter for group in self.optimizer.param_groups for parameter in group["params"]
            )
            add_noise(parameters, self.variance(seen), self.seed, seen)
            self.optimizer.step()
        return loss

    def _synchronized(self) -> AbstractContextManager[Any]:
        """Gradients are those of all ranks, and the step within leaves them as they are."""
        synchronize = getattr(self.optimizer, "synchronize", None)
        if synchronize is None:
            return nullcontext()
        synchronize()
        skipping: AbstractContextManager[Any] = self.optimizer.skip_synchronize()  # type: ignore[attr-defined]
        return skipping

    def __setattr__(self, name: str, value: Any) -> None:
        """What is not ours is the optimizer's:

        `optimizer.weight = n` must reach a DistributedOptimizer.
        """
        if name in _OWN:
            super().__setattr__(name, value)
        else:
            setattr(self.optimizer, name, value)

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # not there yet: a copy in the making
            raise AttributeError(name)
        return getattr(self.optimizer, name)


@torch.no_grad()
def add_noise(parameters: Iterable[Tensor], variance: float, seed: int, seen: int) -> None:
    """Adds noise of this variance to the gradients; one draw for all that are on one device and of
    one dtype."""
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            alike.setdefault((parameter.grad.device, parameter.grad.dtype), []).append(
                _dense(parameter.grad)
            )
    for (device, dtype), grads in alike.items():
        sizes = [grad.numel() for grad in grads]
        noise = torch.randn(
            sum(sizes), generator=generator(seed, seen, device=device), device=device, dtype=dtype
        )
        parts = [
            part.view(grad.shape)
            for part, grad in zip(torch.split(noise, sizes), grads, strict=True)
        ]
        torch._foreach_add_(grads, parts, alpha=variance**0.5)


def _dense(grad: Tensor) -> Tensor:
    if grad.layout is not torch.strided:
        raise ConfigError(
            f"gradient noise needs dense gradients; one of shape {list(grad.shape)} is"
            f" {grad.layout}"
        )
    return grad
