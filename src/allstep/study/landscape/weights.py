"""The weights of a point, set in place in one model.

| base | parameters | running statistics and other buffers |
|---|---|---|
| RUN, RUN2 | those of the run, plus the steps | those of the run |
| the line | interpolated | interpolated, if they are floating-point numbers |

Batch norm is where such plots mislead. Moved weights would have other statistics; a plot that
measures them again at each point shows another function, and one that keeps them, as here, rises
too early. On the line the statistics must be interpolated, because those of neither run fit the
middle.
"""

import hashlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from allstep.study.landscape.directions import direction, filter_dimensions
from allstep.study.landscape.points import Point

Tensors = Mapping[str, Tensor]


class Weights:
    """The model to evaluate, and the weights of one or two runs that it may get.

    `second` is the model of RUN2, None without one. Two directions around RUN are kept; those of
    single points are drawn when needed.
    """

    def __init__(self, model: nn.Module, second: nn.Module | None, seed: int) -> None:
        self.model, self.seed = model, seed
        self.first = _copied(model)
        self.second = None if second is None else _copied(second)
        self._dimensions = filter_dimensions(model)
        self._kept: dict[int, Tensors] = {}
        self._numbers_to_keep = frozenset({0, 1})

    @torch.no_grad()
    def place(self, point: Point) -> None:
        """Give the model the weights of `point`."""
        base = self._base(point)
        for name, tensor in self.model.state_dict().items():
            tensor.copy_(base[name])
        parameters = dict(self.model.named_parameters())
        for number, length in point.steps:
            for name, step in self._direction(point, number, base).items():
                parameters[name].add_(step, alpha=length)

    def _base(self, point: Point) -> Tensors:
        if point.base == "first":
            return self.first
        assert self.second is not None
        if point.base == "second":
            return self.second
        return {
            name: _between(mine, self.second[name], point.part) for name, mine in self.first.items()
        }

    def _direction(self, point: Point, number: int, base: Tensors) -> Tensors:
        """Return a direction around `base`."""
        if point.base != "first" or number not in self._numbers_to_keep:
            return direction(base, self._dimensions, self.seed, number)
        if number not in self._kept:
            self._kept[number] = direction(base, self._dimensions, self.seed, number)
        return self._kept[number]


def _copied(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def _between(mine: Tensor, theirs: Tensor, part: float) -> Tensor:
    """Return the point between two tensors; a counter or a mask keeps the value of the first."""
    return torch.lerp(mine, theirs, part) if mine.is_floating_point() else mine


def has_running_statistics(model: nn.Module) -> bool:
    """Return whether the output of the model depends on buffers that training changes."""
    return any(buffer.is_floating_point() for buffer in model.buffers())


def differences(first: Tensors, second: Tensors) -> list[str]:
    """Return a text for each tensor that only one of two models has, or in another shape."""
    found = [f"{name} is only in the first" for name in first if name not in second]
    found += [f"{name} is only in the second" for name in second if name not in first]
    found += [
        f"{name} is {list(tensor.shape)} in the first and {list(second[name].shape)} in the second"
        for name, tensor in first.items()
        if name in second and tensor.shape != second[name].shape
    ]
    return found


def digest(tensors: Tensors | Sequence[tuple[str, Tensor]]) -> str:
    """Return the SHA-256 of names, types, shapes and values of tensors."""
    total = hashlib.sha256()
    for name, tensor in tensors.items() if isinstance(tensors, Mapping) else tensors:
        total.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        # As bytes: numpy has no bfloat16.
        flat = tensor.detach().cpu().contiguous().flatten()
        total.update(flat.view(torch.uint8).numpy().tobytes())
    return total.hexdigest()
