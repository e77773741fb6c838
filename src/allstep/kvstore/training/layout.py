"""Where the parameters of a model are in flat memory, and how that is cut into units.

A *flat* has all parameters of one parameter group and dtype, each at a multiple of 64 bytes. A
*unit* is the range of a flat that one lock protects, of about 1 MB (D16):

    flat    | conv1.weight | conv1.bias |          fc1.weight          | fc1.bias |
    unit    |<------- 0 ------->|<------- 1 ------->|<------ 2 ------>|     SGD, Adam, ...
    unit    |<----------- 0 ---------->|<------------- 1 ------------>|<-- 2 -->|    LARS, LAMB, ...

Optimizers that use norms of layers need whole parameters, so their units end where a parameter
ends, and a large parameter is a unit. The gaps between parameters are zero and have a gradient of
zero; they are cut like elements.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from allstep.errors import UserError
from allstep.kvstore.memory.key_memory import aligned
from allstep.kvstore.rules.slices import SLICE_BYTES, Span, cut
from allstep.parallel.exchange import Named
from allstep.parallel.exchange.packed_gradients import dense_strides


@dataclass(frozen=True)
class Chunk:
    """The elements `start` to `end` of a flat, which belong to parameter `number`.

    at: the first of them, counted from the start of the parameter.
    """

    number: int
    start: int
    end: int
    at: int


@dataclass(frozen=True)
class UnitPlan:
    """Elements `start` to `end` of flat `flat`, of parameter group `group`."""

    flat: int
    group: int
    start: int
    end: int
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class FlatPlan:
    """The parameters of one group and dtype: where each starts, in elements, by its number."""

    group: int
    dtype: torch.dtype
    starts: dict[int, int]
    numel: int

    @property
    def nbytes(self) -> int:
        """The size of one copy, with padding."""
        return aligned(max(1, self.numel * self.dtype.itemsize))


class Layout:
    """The flats and units of an optimizer's parameters.

    groups: the parameter groups. named: all parameters. is_whole: cut at parameters only.
    """

    def __init__(
        self, groups: Sequence[Sequence[Tensor]], named: Sequence[Named], is_whole: bool
    ) -> None:
        self.named, self.is_whole = list(named), is_whole
        _check(self.named)
        numbers = {id(each.parameter): number for number, each in enumerate(named)}
        self.flats: list[FlatPlan] = []
        for group, parameters in enumerate(groups):
            # A parameter without a name here needs no gradient.
            mine = [numbers[id(each)] for each in parameters if id(each) in numbers]
            for dtype in dict.fromkeys(named[number].parameter.dtype for number in mine):
                self.flats.append(self._flat(group, dtype, mine))
        self.units = [unit for flat in range(len(self.flats)) for unit in self._units(flat)]

    def _flat(self, group: int, dtype: torch.dtype, numbers: Sequence[int]) -> FlatPlan:
        starts, at = {}, 0
        for number in numbers:
            parameter = self.named[number].parameter
            if parameter.dtype is dtype:
                starts[number] = at
                at += aligned(parameter.numel() * dtype.itemsize) // dtype.itemsize
        return FlatPlan(group, dtype, starts, at)

    def _units(self, index: int) -> list[UnitPlan]:
        flat = self.flats[index]
        spans = self._whole_spans(flat) if self.is_whole else cut(flat.numel, flat.dtype.itemsize)
        return [
            UnitPlan(index, flat.group, start, end, self._chunks(flat, start, end))
            for start, end in spans
        ]

    def _whole_spans(self, flat: FlatPlan) -> list[Span]:
        """Return spans of whole parameters, together of at most 1 MB unless one is larger."""
        ends = [*list(flat.starts.values())[1:], flat.numel]
        spans, begin, most = list[Span](), 0, SLICE_BYTES // flat.dtype.itemsize
        for start, end in zip(flat.starts.values(), ends, strict=True):
            if end - begin > most and start > begin:
                spans.append((begin, start))
                begin = start
        return [*spans, (begin, flat.numel)]

    def _chunks(self, flat: FlatPlan, start: int, end: int) -> tuple[Chunk, ...]:
        found = []
        for number, at in flat.starts.items():
            first = max(start, at)
            last = min(end, at + self.named[number].parameter.numel())
            if first < last:
                found.append(Chunk(number, first, last, first - at))
        return tuple(found)

    @property
    def nbytes(self) -> int:
        """The size of one copy of all flats."""
        return sum(flat.nbytes for flat in self.flats)

    def views(self, flats: Sequence[Tensor]) -> dict[int, Tensor]:
        """Return a view of these flats for each parameter, with its shape and strides."""
        found = {}
        for plan, flat in zip(self.flats, flats, strict=True):
            for number, start in plan.starts.items():
                parameter = self.named[number].parameter
                strides = dense_strides(parameter)
                found[number] = flat.as_strided(parameter.shape, strides, start)
        return found

    def describe(self) -> list[str]:
        """Return what must be the same on all parties: name, shape and type of each parameter."""
        return [
            f"{name}: {parameter.dtype} {list(parameter.shape)}" for name, parameter in self.named
        ]


def _check(named: Sequence[Named]) -> None:
    if not named:
        raise UserError("no parameter needs a gradient: there is nothing to train")
    for name, parameter in named:
        if parameter.device.type != "cpu":
            raise UserError(
                f"parameter {name!r} is on {parameter.device}; parties share weights in the memory"
                " of the host: train on the CPU, or use sync=allreduce"
            )
        if not parameter.dtype.is_floating_point:
            raise UserError(
                f"parameter {name!r} is {parameter.dtype}; parties share floating-point weights"
                " only: use sync=allreduce"
            )
