"""An exponential moving average of the weights: smoother than the weights themselves, and often
better on the validation part.

After every update

```
average = d * average + (1 - d) * weights           d = min(decay, (1 + updates) / (10 + updates))
```

The second d is that of a young run: the weights it starts from are random, and would else stay in
the average for 1 / (1 - decay) updates. A look every `every` updates, with d ** every, comes to
nearly the same and costs the less.

Floating-point buffers (the running statistics of norms) are averaged like the parameters, all
others (counters) are copied. The average is computed alike on all ranks, from equal weights, so it
is equal on all of them, and it is no matter which of them saves it.
"""

import copy
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from allstep.errors import CheckpointError


class Average:
    """The average of a model's weights. `model` here is a copy that holds it, for evaluation only."""

    def __init__(self, model: nn.Module, decay: float, every: int = 1) -> None:
        self._source = model
        self._decay = decay
        self._every = every
        self.updates = 0
        """Of the run so far."""
        self.model = _copy_of(model)

    @torch.no_grad()
    def update(self) -> None:
        """After each update of the weights; looks at them at every `every`th."""
        self.updates += 1
        if self.updates % self._every:
            return
        decay = min(self._decay, (1 + self.updates) / (10 + self.updates)) ** self._every
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
        """What a checkpoint keeps, beside `updates`: the average by name, in its own memory."""
        return {name: tensor.detach() for name, tensor in _tensors(self.model)}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor], updates: int) -> None:
        """Goes on from what `tensors` and `updates` were."""
        ours = dict(_tensors(self.model))
        if odd := sorted(ours.keys() ^ tensors.keys()):
            missing = [name for name in odd if name in ours]
            raise CheckpointError(
                f"the average of another net: {len(missing)} tensors are missing and"
                f" {len(odd) - len(missing)} are not known; the first is {odd[0]!r}"
            )
        for name, tensor in ours.items():
            if tensor.shape != tensors[name].shape:
                raise CheckpointError(
                    f"the average of another net: {name!r} is {tuple(tensors[name].shape)},"
                    f" expected {tuple(tensor.shape)}"
                )
            tensor.copy_(tensors[name])
        self.updates = updates


def _copy_of(model: nn.Module) -> nn.Module:
    """In memory of its own, also where the model's weights are shared by the ranks of a host."""
    twin = copy.deepcopy(model)
    for parameter in twin.parameters():
        parameter.requires_grad_(False)
        parameter.grad = None
    return twin.eval()


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()
