"""Gaussian noise on the gradients that decreases step by step (Neelakantan et al. 2015,
https://arxiv.org/abs/1511.06807).

```
g = g + N(0, variance)        variance = eta / (1 + t)^gamma at step t
```

Large batches remove noise from the gradient that helped to leave sharp minima; this adds some
again. It helps deep models that are difficult to initialize, and does not replace a small batch,
whose noise has the shape of the data's noise.

All ranks must add the same noise to the reduced gradient, or their weights diverge. So the noise is
drawn from (seed, samples seen), not from the rank, and after `synchronize()` if the optimizer has
one (`DistributedOptimizer`).
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
    """Wraps an optimizer; all attributes except `step` are the optimizer's own.

        optimizer = NoisyGradients(SGD(...), batch=1024, seed=0)
        optimizer.step(seen)

    `batch`: samples of a step, so that the schedule counts samples. `seed`: of the noise. `eta`:
    variance at step 0; the paper uses 0.01, 0.3 (default) and 1.0. `gamma`: exponent of the
    decrease (default: 0.55).
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
        """Return the variance of the noise in the step after `seen` samples."""
        return float(self.eta / (1 + seen / self.batch) ** self.gamma)

    def step(self, seen: int, closure: Callable[[], Any] | None = None) -> Any:
        """Make the optimizer's step with noise on its gradients. `seen`: samples before the step.

        `closure` is called once, before the noise.
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
        """Reduce the gradients over all ranks.

        Return a context in which a step does not reduce them again.
        """
        synchronize = getattr(self.optimizer, "synchronize", None)
        if synchronize is None:
            return nullcontext()
        synchronize()
        # Only a DistributedOptimizer has the method.
        skip = self.optimizer.skip_synchronize  # type: ignore[attr-defined]
        skipping: AbstractContextManager[Any] = skip()
        return skipping

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the optimizer, unless it is one of this class.

        `optimizer.weight = n` must reach a DistributedOptimizer.
        """
        if name in _OWN:
            super().__setattr__(name, value)
        else:
            setattr(self.optimizer, name, value)

    def __getattr__(self, name: str) -> Any:
        # Not set yet while copy or pickle build the object.
        if name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)


@torch.no_grad()
def add_noise(parameters: Iterable[Tensor], variance: float, seed: int, seen: int) -> None:
    """Add noise of this variance to the gradients, with one draw for each device and dtype.

    `seed`, `seen`: determine the noise, as in `step_seed`.
    """
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
