"""Updates of one unit at a time, by the wrapped optimizer's own class.

Each party has an inner optimizer whose parameters are views of the flats that updates change: one
for each unit if elements are treated separately, else one for each parameter. Its state is in
memory too, which the parties share (`updates.slice_state`), so it makes no difference which party
applies a gradient: one momentum and one step count, for all.

**Parameters without a gradient** in a step do not change, as in torch, and neither does their
state. In a unit that several parameters share, their elements are restored after the update.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from allstep.errors import UserError
from allstep.kvstore.memory.key_memory import aligned, tensor_in
from allstep.kvstore.training.layout import Chunk, Layout, UnitPlan
from allstep.kvstore.training.whole_state import cut_state
from allstep.kvstore.updates.slice_state import SliceState, StateEntry, state_entries
from allstep.parallel.subclass import like

State = dict[Any, Any]


class StatePlan:
    """What the optimizer keeps for each tensor that it updates, and the size of the memory.

    outer: the optimizer of whole parameters; its state is cut. wrapped: its class, as the user
    knows it.
    """

    def __init__(self, outer: Any, wrapped: type, layout: Layout) -> None:
        self.layout = layout
        self._outer, self._wrapped = outer, wrapped
        self._known: dict[Any, tuple[StateEntry, ...]] = {}
        self.entries = [
            [self._entries(unit, chunk, shape) for chunk, shape in tensors_of(layout, unit)]
            for unit in layout.units
        ]

    def _entries(
        self, unit: UnitPlan, chunk: Chunk | None, shape: torch.Size
    ) -> tuple[StateEntry, ...]:
        given = cut_state(self.layout, unit, chunk, self._outer.state)
        dtype = self.layout.flats[unit.flat].dtype
        if given:
            return self._try(unit, shape, dtype, given)
        key = unit.group, shape, dtype
        if key not in self._known:
            self._known[key] = self._try(unit, shape, dtype, {})
        return self._known[key]

    def _try(
        self, unit: UnitPlan, shape: torch.Size, dtype: torch.dtype, given: State
    ) -> tuple[StateEntry, ...]:
        """Make a step on zeros to learn what the optimizer keeps."""
        parameter = Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)
        parameter.grad = torch.zeros(shape, dtype=dtype)
        inner = inner_optimizer(self._outer, self._wrapped)
        inner.param_groups = [{**self._outer.param_groups[unit.group], "params": [parameter]}]
        if given:
            inner.state[parameter] = {
                key: value.clone() if isinstance(value, Tensor) else value
                for key, value in given.items()
            }
        try:
            inner.step()
        except Exception as error:
            raise UserError(
                f"{self._wrapped.__name__} cannot update weights in shared memory, in parts of"
                f" shape {list(shape)}: {type(error).__name__}: {error}"
            ) from error
        return state_entries(self._wrapped.__name__, inner.state.get(parameter, {}))

    @property
    def nbytes(self) -> int:
        """The size of the memory for all state."""
        units = sum(SliceState.nbytes(entries) for unit in self.entries for entries in unit)
        return self._flag_bytes + units

    @property
    def _flag_bytes(self) -> int:
        return aligned(8 * len(self.layout.units))

    def place(self, memory: memoryview) -> tuple[memoryview, list[list[SliceState]]]:
        """Return a flag for each unit, whether it has state, and the state of its tensors."""
        at, states = self._flag_bytes, []
        for unit in self.entries:
            mine = []
            for entries in unit:
                mine.append(SliceState(entries, memory, at))
                at += SliceState.nbytes(entries)
            states.append(mine)
        return memory[: 8 * len(self.layout.units)].cast("q"), states


def tensors_of(layout: Layout, unit: UnitPlan) -> Iterator[tuple[Chunk | None, torch.Size]]:
    """Yield the tensors that are updated in a unit: its parameters, or all of it (None)."""
    if not layout.is_whole:
        yield None, torch.Size([unit.end - unit.start])
        return
    for chunk in unit.chunks:
        yield chunk, layout.named[chunk.number].parameter.shape


def inner_optimizer(outer: Any, wrapped: type) -> Any:
    """Return an optimizer of the wrapped class with the outer one's settings, without parameters.

    The hooks of the outer one do not count for its parts.
    """
    inner = like(outer, wrapped)
    inner.state = defaultdict(dict)
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        setattr(inner, name, OrderedDict())
    return inner


class UnitUpdates:
    """Applies gradients to units.

    flats: the weights that are changed. memory: `plan.nbytes` bytes for the state.
    """

    def __init__(
        self,
        outer: Any,
        wrapped: type,
        plan: StatePlan,
        flats: Sequence[Tensor],
        memory: memoryview,
    ) -> None:
        self.layout, self._flats = plan.layout, flats
        self.has_state, self.states = plan.place(memory)
        self._inner = inner_optimizer(outer, wrapped)
        self._views = self.layout.views(flats)
        self._tensors = [
            [self._tensor(unit, chunk) for chunk, _ in tensors_of(self.layout, unit)]
            for unit in self.layout.units
        ]
        self._groups: list[dict[str, Any]] = []

    def _tensor(self, unit: UnitPlan, chunk: Chunk | None) -> Parameter:
        flat = self._flats[unit.flat]
        view = flat[unit.start : unit.end] if chunk is None else self._views[chunk.number]
        return Parameter(view, requires_grad=False)

    def use_groups(self, groups: Sequence[Mapping[str, Any]], lrs: Sequence[float]) -> None:
        """Update with these options from now on, and with these learning rates, one per group."""
        self._groups = [{**group, "lr": lr} for group, lr in zip(groups, lrs, strict=True)]

    def apply(self, index: int, gradients: Sequence[Tensor], missing: set[int]) -> None:
        """Update unit `index`. gradients: flats. missing: parameters without a gradient."""
        unit, tensors = self.layout.units[index], self._tensors[index]
        present = [chunk for chunk in unit.chunks if chunk.number not in missing]
        if not present:
            return
        state = self._inner.state
        if self.has_state[index]:
            for tensor, shared in zip(tensors, self.states[index], strict=True):
                shared.load(state[tensor])
        flat = gradients[unit.flat]
        is_part = len(present) < len(unit.chunks) and not self.layout.is_whole
        kept = self._kept(index, missing) if is_part else []
        self._set_gradients(unit, tensors, flat, missing)
        self._inner.param_groups = [{**self._groups[unit.group], "params": tensors}]
        self._inner.step()
        for tensor, shared in zip(tensors, self.states[index], strict=True):
            tensor.grad = None
            if state[tensor]:
                shared.keep(state[tensor])
        self.has_state[index] = 1
        for view, copy in kept:
            view.copy_(copy)

    def _set_gradients(
        self, unit: UnitPlan, tensors: Sequence[Parameter], flat: Tensor, missing: set[int]
    ) -> None:
        if not self.layout.is_whole:
            tensors[0].grad = flat[unit.start : unit.end]
            return
        for tensor, chunk in zip(tensors, unit.chunks, strict=True):
            if chunk.number not in missing:
                # Parameters of an inner optimizer have the shape and strides of the model's.
                tensor.grad = flat.as_strided(tensor.shape, tensor.stride(), chunk.start)

    def _kept(self, index: int, missing: set[int]) -> list[tuple[Tensor, Tensor]]:
        """Return the elements that must not change, each with a copy."""
        unit = self.layout.units[index]
        length = unit.end - unit.start
        whole = [self._flats[unit.flat][unit.start : unit.end]]
        whole += [view for view in self.states[index][0].views if view.shape == (length,)]
        parts = [
            view[chunk.start - unit.start : chunk.end - unit.start]
            for view in whole
            for chunk in unit.chunks
            if chunk.number in missing
        ]
        return [(part, part.clone()) for part in parts]


def private_memory(nbytes: int) -> memoryview:
    """Return memory of this process alone, zero."""
    return memoryview(bytearray(max(64, nbytes)))


def flats_in(layout: Layout, memory: memoryview) -> list[Tensor]:
    """Return the flats of a layout in memory."""
    at, flats = 0, []
    for plan in layout.flats:
        flats.append(tensor_in(memory, at, plan.dtype, plan.numel))
        at += plan.nbytes
    return flats
