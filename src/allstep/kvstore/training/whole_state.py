"""The optimizer's state, cut from whole parameters to units and assembled from units.

A checkpoint has the state of whole parameters, whatever number of parties saved it. In memory it
belongs to the tensors that are updated together (`layout`): a unit that several parameters share
has one momentum tensor, and one step count for all of them.

A state with a value for each element is divided. Any other, such as a step count, belongs to the
tensor as a whole: a unit takes that of its first parameter, and a parameter that of its first unit.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from allstep.kvstore.training.layout import Chunk, Layout, UnitPlan
from allstep.kvstore.updates.slice_state import NUMBERS, SliceState
from allstep.parallel.exchange.packed_gradients import flat_in_memory

State = Mapping[Any, Mapping[str, Any]]


def cut_state(layout: Layout, unit: UnitPlan, chunk: Chunk | None, state: State) -> dict[str, Any]:
    """Return the state of a tensor that is updated in a unit, from that of whole parameters.

    chunk: its parameter, or None if the tensor is the whole unit. Values may be views of `state`.
    """
    if chunk is not None:
        given = state.get(layout.named[chunk.number].parameter, {})
        return {key: value for key, value in given.items() if value is not None}
    found: dict[str, Any] = {}
    for each in unit.chunks:
        parameter = layout.named[each.number].parameter
        for key, value in state.get(parameter, {}).items():
            if value is None:
                continue
            if not _is_per_element(value, parameter):
                found.setdefault(key, value)
                continue
            if key not in found:
                found[key] = torch.zeros(unit.end - unit.start, dtype=value.dtype)
            count = each.end - each.start
            part = _in_memory_order(value, parameter)[each.at : each.at + count]
            found[key][each.start - unit.start : each.end - unit.start] = part
    return found


def whole_state(
    layout: Layout, has_state: Sequence[int], states: Sequence[Sequence[SliceState]]
) -> dict[int, dict[str, Any]]:
    """Return copies of the state of each parameter, by its number."""
    found: dict[int, dict[str, Any]] = {}
    for unit, flag, mine in zip(layout.units, has_state, states, strict=True):
        if not flag:
            continue
        for chunk, shared in _chunks_with_state(layout, unit, mine):
            parameter = layout.named[chunk.number].parameter
            values = found.setdefault(chunk.number, {})
            for entry, view in zip(shared.entries, shared.views, strict=True):
                if entry.kind != "tensor":
                    values.setdefault(entry.name, NUMBERS[entry.kind](view.item()))
                elif layout.is_whole:
                    values[entry.name] = view.clone()
                elif entry.shape != (unit.end - unit.start,):
                    values.setdefault(entry.name, view.clone())
                else:
                    _put_chunk(values, entry.name, unit, chunk, view, parameter)
    return found


def _chunks_with_state(
    layout: Layout, unit: UnitPlan, states: Sequence[SliceState]
) -> Iterator[tuple[Chunk, SliceState]]:
    for place, chunk in enumerate(unit.chunks):
        yield chunk, states[place if layout.is_whole else 0]


def _put_chunk(
    values: dict[str, Any],
    name: str,
    unit: UnitPlan,
    chunk: Chunk,
    view: Tensor,
    parameter: Tensor,
) -> None:
    if name not in values:
        values[name] = torch.zeros_like(parameter, dtype=view.dtype)
    part = view[chunk.start - unit.start : chunk.end - unit.start]
    flat_in_memory(values[name])[chunk.at : chunk.at + len(part)] = part


def put_state(
    layout: Layout,
    has_state: memoryview,
    states: Sequence[Sequence[SliceState]],
    state: State,
) -> None:
    """Set the state of all units from that of whole parameters."""
    for index, (unit, mine) in enumerate(zip(layout.units, states, strict=True)):
        chunks = unit.chunks if layout.is_whole else (None,)
        flag = 0
        for chunk, shared in zip(chunks, mine, strict=True):
            given = cut_state(layout, unit, chunk, state)
            for entry, view in zip(shared.entries, shared.views, strict=True):
                value = given.get(entry.name)
                if value is None:
                    view.zero_()
                elif isinstance(value, Tensor):
                    view.copy_(value.reshape(view.shape))
                    flag = 1
                else:
                    view.fill_(value)
                    flag = 1
        has_state[index] = flag


def _is_per_element(value: Any, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape and bool(value.shape)


def _in_memory_order(value: Tensor, parameter: Tensor) -> Tensor:
    laid = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
    return laid.as_strided((laid.numel(),), (1,))
