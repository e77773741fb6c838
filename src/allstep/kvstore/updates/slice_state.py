"""What an optimizer keeps for a slice, such as its momentum, and where that is in memory.

The optimizer creates its state itself, in private memory, at its first step on a slice. That step
runs under the slice's lock; the state is then copied to the slice's place in shared memory, and the
slice is marked: from then on every worker uses the shared state. So the first step is torch's own
one (momentum starts as the gradient, a step count at zero), whichever worker makes it.

The places must exist before. Which values an optimizer keeps, and their shapes, depends on its
settings and on the slice's shape, not on its values: a step on zeros shows them (`entries_for`).
Plain numbers among them are kept as float64.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from allstep.errors import UserError
from allstep.kvstore.memory.key_memory import aligned, short, tensor_in
from allstep.kvstore.updates.optimizer_class import OptimizerClass

NUMBERS = {"bool": bool, "int": int, "float": float}
"""The plain numbers that an optimizer may keep, by the name of their type."""


class StateEntry(NamedTuple):
    """One value that an optimizer keeps. kind: "tensor", or the type of a plain number."""

    name: str
    kind: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Its size in memory, with padding."""
        return aligned(max(1, torch.Size(self.shape).numel() * self.dtype.itemsize))


def entries_for(
    chosen: OptimizerClass, shape: tuple[int, ...], dtype: torch.dtype
) -> tuple[StateEntry, ...]:
    """Return what the optimizer keeps for a parameter of this shape and type."""
    parameter = Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)
    try:
        optimizer = chosen.make([parameter])
        parameter.grad = torch.zeros(shape, dtype=dtype)
        optimizer.step()
    except Exception as error:
        raise UserError(
            f"set_optimizer: {chosen.cls.__name__} cannot update a value of {short(dtype)}"
            f" {list(shape)}: {type(error).__name__}: {error}"
        ) from error
    return state_entries(chosen.cls.__name__, optimizer.state.get(parameter, {}))


def state_entries(optimizer: str, values: Mapping[str, Any]) -> tuple[StateEntry, ...]:
    """Return what an optimizer keeps for a parameter, after a step. optimizer: its name."""
    return tuple(
        _entry(optimizer, name, value) for name, value in values.items() if value is not None
    )


def _entry(optimizer: str, name: str, value: Any) -> StateEntry:
    if isinstance(value, Tensor):
        return StateEntry(name, "tensor", value.dtype, tuple(value.shape))
    kind = type(value).__name__
    if kind in NUMBERS:
        return StateEntry(name, kind, torch.float64, ())
    raise UserError(
        f"{optimizer} keeps {name!r}, a {kind}; a store shares tensors and plain numbers only"
    )


class SliceState:
    """The shared state of one slice. memory: room for all entries, from byte `at` on."""

    def __init__(self, entries: Sequence[StateEntry], memory: memoryview, at: int) -> None:
        self.entries = tuple(entries)
        self.views: list[Tensor] = []
        for entry in entries:
            numel = torch.Size(entry.shape).numel()
            self.views.append(tensor_in(memory, at, entry.dtype, numel).view(entry.shape))
            at += entry.nbytes
        both = list(zip(self.entries, self.views, strict=True))
        self._tensors = [(entry.name, view) for entry, view in both if entry.kind == "tensor"]
        self._numbers = [(entry, view) for entry, view in both if entry.kind != "tensor"]

    def load(self, values: dict[str, Any]) -> None:
        """Let the optimizer's `values` be the shared ones."""
        for name, view in self._tensors:
            values[name] = view
        for entry, view in self._numbers:
            values[entry.name] = NUMBERS[entry.kind](view.item())

    def keep(self, values: dict[str, Any]) -> None:
        """Copy what the optimizer has created or replaced to the shared memory."""
        for name, view in self._tensors:
            value = values.get(name)
            if value is not None and value is not view:
                view.copy_(value)
                values[name] = view
        for entry, view in self._numbers:
            view.fill_(values[entry.name])

    @staticmethod
    def nbytes(entries: Sequence[StateEntry]) -> int:
        """Return the size of the memory for these entries."""
        return sum(entry.nbytes for entry in entries)
