"""An exponential moving average (EMA) of the weights.

It is smoother than the weights, and often better on the validation split. After every update


```
average = d * average + (1 - d) * weights           d = min(decay, (1 + updates) / (10 + updates))
```

The second value of d applies early in the run: the initial weights are random, and would otherwise
stay in the average for 1 / (1 - decay) updates. Averaging only every `every` updates, with
d ** every, gives nearly the same result at a lower cost.

Floating-point buffers (the running statistics of norms) are averaged like the parameters; all
others (counters) are copied. All ranks compute the average from equal weights, so it is equal on
all of them, and any rank can save it.
"""

import copy
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from allstep.errors import CheckpointError


class Average:
    """The EMA of a model's weights. Its `model` is a copy with these weights, for evaluation only.

    `decay` is the EMA's decay per update, `every` the number of updates between two averages.
    """

    def __init__(self, model: nn.Module, decay: float, every: int = 1) -> None:
        self._source = model
        self._decay = decay
        self._every = every
        self.updates = 0
        """Updates of the run so far."""
        self.model = _copy_of(model)

    @torch.no_grad()
    def update(self, updates: int = 1) -> None:
        """Count updates of the weights, and average them if there was an `every`-th one.

        Must be called after each update, or after each round of `updates` after which all ranks
        have the same weights.
        """
        before, self.updates = self.updates, self.updates + updates
        if before // self._every == self.updates // self._every:
            return
        power = max(self._every, updates)
        decay = min(self._decay, (1 + self.updates) / (10 + self.updates)) ** power
        ours, theirs = dict(_tensors(self.model)), dict(_tensors(self._source))
        averaged = [
            name for name in ours if ours[name].is_floating_point() or ours[name].is_complex()
        ]
        torch._foreach_lerp_(
            [ours[name] for name in averaged], [theirs[name] for name in averaged], 1 - decay
        )
        for name in ours.keys() - set(averaged):
            ours[name].copy_(theirs[name])

    def tensors(self) -> dict[str, Tensor]:
        """Return the averaged tensors by name, not copied, for a checkpoint."""
        return {name: tensor.detach() for name, tensor in _tensors(self.model)}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor], updates: int) -> None:
        """Restore the state of a checkpoint. Raise CheckpointError if it is of another model."""
        ours = dict(_tensors(self.model))
        _check_same_tensors(ours, tensors)
        for name, tensor in ours.items():
            tensor.copy_(tensors[name])
        self.updates = updates


def _check_same_tensors(ours: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError unless both have the same names and shapes."""
    if odd := sorted(ours.keys() ^ found.keys()):
        missing = [name for name in odd if name in ours]
        raise CheckpointError(
            f"the EMA is of another model: {len(missing)} tensors are missing and"
            f" {len(odd) - len(missing)} are unknown; the first is {odd[0]!r}"
        )
    for name, tensor in ours.items():
        if tensor.shape != found[name].shape:
            raise CheckpointError(
                f"the EMA is of another model: {name!r} is {tuple(found[name].shape)},"
                f" expected {tuple(tensor.shape)}"
            )


def _copy_of(model: nn.Module) -> nn.Module:
    """Return a copy with its own memory, even if the ranks of a host share the model's weights."""
    twin = copy.deepcopy(model)
    for parameter in twin.parameters():
        parameter.requires_grad_(False)
        parameter.grad = None
    return twin.eval()


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()
