"""The optimizer of one key: applies a gradient to one slice at a time.

Each worker has a torch optimizer of its own for each key. Its parameters are views of the shared
value, one for each slice, and its state is the shared state (`slice_state`), so it makes no
difference which worker applies a gradient.

An optimizer that treats each element separately gives the same result on slices as on the whole
value. One that uses norms of layers (LARS, LAMB, any class without `elementwise = True` that torch
does not bring) gets the whole value as its one slice.

With float32 master weights the parameters are views of these, which are part of the state, and the
value is a copy of them in half precision.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from allstep.kvstore.memory.key_memory import KeyShape, Slice, StoredKey, aligned, tensor_in
from allstep.kvstore.rules.key_lists import Key
from allstep.kvstore.rules.slices import Span
from allstep.kvstore.updates.optimizer_class import OptimizerClass
from allstep.kvstore.updates.plain_step import plain_step
from allstep.kvstore.updates.slice_state import SliceState, StateEntry, entries_for


class StatePlan:
    """The state of a key: its master weights and, for each slice, what the optimizer keeps.

    What it keeps for each element is contiguous over all slices, so that rows can be found in it:

        master weights | momentum of slice 0, slice 1, ... | step count of slice 0, slice 1, ...
    """

    def __init__(self, chosen: OptimizerClass, form: KeyShape) -> None:
        self.is_whole = chosen.is_whole
        self.dtype = chosen.master_dtype(form.dtype)
        self.has_master = self.dtype is not form.dtype
        self._master_bytes = aligned(form.numel * self.dtype.itemsize) if self.has_master else 0
        self.spans: list[Span] = [(0, form.numel)] if chosen.is_whole else form.spans
        shapes = [form.shape if chosen.is_whole else (end - start,) for start, end in self.spans]
        # Nearly all slices have the same shape.
        by_shape = {shape: entries_for(chosen, shape, self.dtype) for shape in set(shapes)}
        self.entries: list[tuple[StateEntry, ...]] = [by_shape[shape] for shape in shapes]
        self.is_cut = [
            not chosen.is_whole and entry.shape == shapes[0] for entry in self.entries[0]
        ]

    @property
    def nbytes(self) -> int:
        """The size of the memory for all of it."""
        return self._master_bytes + sum(map(self._region_bytes, range(len(self.is_cut))))

    def _region_bytes(self, index: int) -> int:
        """Return the bytes of an entry over all slices."""
        entry = self.entries[0][index]
        if self.is_cut[index]:
            return aligned(max(1, self.spans[-1][1] * entry.dtype.itemsize))
        return len(self.spans) * entry.nbytes

    def _region(self, index: int) -> int:
        """Return where an entry begins."""
        return self._master_bytes + sum(map(self._region_bytes, range(index)))

    def master_in(self, memory: memoryview, numel: int) -> Tensor | None:
        """Return the master weights in the key's memory; None if there are none."""
        return tensor_in(memory, 0, self.dtype, numel) if self.has_master else None

    def states_in(self, memory: memoryview) -> list[SliceState]:
        """Return the state of each slice in the key's memory."""
        regions = [self._region(index) for index in range(len(self.is_cut))]
        states = []
        for number, ((start, _), entries) in enumerate(zip(self.spans, self.entries, strict=True)):
            places = [
                at + (start * entry.dtype.itemsize if is_cut else number * entry.nbytes)
                for at, entry, is_cut in zip(regions, entries, self.is_cut, strict=True)
            ]
            states.append(SliceState(entries, memory, 0, places))
        return states

    def tables_in(self, memory: memoryview) -> list[Tensor]:
        """Return the memory of each entry over all slices.

        Flat, one value for each element; or slices x padded values for what a slice has once.
        """
        tables = []
        for index, entry in enumerate(self.entries[0]):
            padded = entry.nbytes // entry.dtype.itemsize
            size = self.spans[-1][1] if self.is_cut[index] else len(self.spans) * padded
            table = tensor_in(memory, self._region(index), entry.dtype, size)
            tables.append(table if self.is_cut[index] else table.view(-1, padded))
        return tables

    def is_like(self, other: "StatePlan") -> bool:
        """Return whether the state of the other plan may be used in this one."""
        return (self.spans, self.dtype, self.entries) == (other.spans, other.dtype, other.entries)


class KeyOptimizer:
    """Updates a key with the optimizer `chosen`.

    memory: `plan.nbytes` bytes for the state, which all workers share.
    """

    def __init__(
        self, stored: StoredKey, chosen: OptimizerClass, plan: StatePlan, memory: memoryview
    ) -> None:
        self.plan, self._stored, self.memory = plan, stored, memory
        stored.use_whole(plan.is_whole)
        self.master = plan.master_in(memory, stored.form.numel)
        self.states, self.tables = plan.states_in(memory), plan.tables_in(memory)
        self.chosen = chosen
        self.source = stored.flat if self.master is None else self.master
        self._parameters = [
            Parameter(self._shaped(self.source[start:end]), requires_grad=False)
            for start, end in plan.spans
        ]
        # As groups with one slice each.
        self._alone = [[parameter] for parameter in self._parameters]
        self._optimizer = chosen.make(self._parameters)
        self._group: dict[str, Any] = self._optimizer.param_groups[0]
        self._step = plain_step(self._optimizer)

    def _shaped(self, flat: Tensor) -> Tensor:
        return flat.view(self._stored.shape) if self.plan.is_whole else flat

    def use_settings(self, chosen: OptimizerClass) -> None:
        """Continue with other settings of the same class, such as a new learning rate."""
        made = chosen.make(self._parameters)
        # A constructor may create state; the present one stays.
        made.state = self._optimizer.state
        self.chosen = chosen
        self._optimizer, self._group = made, made.param_groups[0]
        self._step = plain_step(made)

    def copy_to_master(self) -> None:
        """Set the master weights to the value; only one worker does it."""
        if self.master is not None:
            self.master.copy_(self._stored.flat)

    def apply(self, each: Slice, gradient: Tensor) -> None:
        """Update a slice, which the caller has locked, with its part of a gradient."""
        parameter, state = self._parameters[each.index], self.states[each.index]
        values = self._optimizer.state[parameter]
        if each.has_state:
            state.load(values)
        self._step_with(parameter, self._shaped(gradient), self._alone[each.index])
        state.keep(values)
        each.has_state = True
        if self.master is not None:
            self._stored.flat[each.start : each.end].copy_(self.master[each.start : each.end])

    def _step_with(self, parameter: Parameter, gradient: Tensor, alone: list[Parameter]) -> None:
        # A call that changes nothing takes as long as the update of 4 KB.
        if gradient.dtype is not parameter.dtype:
            gradient = gradient.to(parameter.dtype)
        parameter.grad = gradient
        self._group["params"] = alone
        self._step()
        parameter.grad = None

    def update_alone(
        self, values: Tensor, gradient: Tensor, state: dict[str, Any] | None
    ) -> dict[str, Any]:
        """Update values that are no slice; return their state. state: None for their first."""
        parameter = Parameter(values, requires_grad=False)
        if state is None:
            # A constructor may create state, so it has to know this parameter.
            first = self.chosen.make([parameter])
            parameter.grad = gradient.to(parameter.dtype)
            first.step()
            return dict(first.state[parameter])
        self._optimizer.state[parameter] = state
        try:
            self._step_with(parameter, gradient, [parameter])
        finally:
            state = dict(self._optimizer.state.pop(parameter))
        return state


def apply_slice(optimizer: KeyOptimizer, each: Slice, gradient: Tensor) -> None:
    """Update a locked slice, with an odd version while it changes.

    After an error the version stays odd, so the next holder of the lock counts a torn update.
    """
    each.begin()
    optimizer.apply(each, gradient)
    each.finish()


def may_keep_state(
    optimizers: Mapping[Key, KeyOptimizer],
    before: OptimizerClass | None,
    chosen: OptimizerClass,
    plans: Mapping[Key, StatePlan],
) -> bool:
    """Return whether an optimizer of other settings may continue with the state of the last one."""
    is_same = before is not None and before.cls is chosen.cls
    return is_same and all(optimizers[key].plan.is_like(plan) for key, plan in plans.items())


def plain_sum(stored: StoredKey, each: Slice, total: Tensor) -> None:
    """Replace a slice by a sum: what a push does in a store without an optimizer."""
    with torch.no_grad():
        stored.flat[each.start : each.end].copy_(total)
