"""Gradients of another framework: a fixed list of arrays that are not parameters.

A front-end passes views of its framework's memory, the whole list in one call. Header, unused
entries, numbers of samples and norms are those of `AllReduce`; nothing is negotiated per step.

**In place**: for memory that the front-end owns (an output that XLA aliased to its input, an array
opened for writing). The results replace the arrays.

**Into our own memory**: a gradient of TensorFlow may be a variable's own memory, so it is only
read. The gradients of one dtype are copied into one buffer in shared memory, summed there, and the
results are views of it, which a framework takes over without a copy (DLPack). A buffer is used
again once all of its views are gone; a framework holds those of one step until the next, so there
are usually two::

    arrays of the framework --copy--> | a | b |  c  | ...   summed where they are
                                        |   |    |
                                        views, the framework's new gradients
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from allstep.comm.group.process_group import AllstepGroup
from allstep.comm.op.gradient_norms import NOTHING, Wanted
from allstep.errors import UserError
from allstep.parallel.exchange.all_reduce import AllReduce
from allstep.parallel.exchange.buckets import Bucket
from allstep.parallel.exchange.exchange import Listener, Rule
from allstep.parallel.exchange.packed_gradients import Pack, make_pack
from allstep.parallel.exchange.parameter_order import Named

# A framework that keeps the results of more steps gets memory that is not kept.
_MAX_BUFFERS = 8
# Elements from which a call of its own is faster than one more pass.
_LARGE = 1 << 14
ALIGNMENT = 64
"""Bytes. Every result starts at a multiple of it: TensorFlow ends the process otherwise."""


class ArrayList:
    """Combines the arrays of the ranks. All ranks make it, and call it, together.

    `key`: distinguishes this list from others on the same group. `named`: a name for each array,
    and a tensor with its shape and dtype, whose values are not used. `in_place`: whether the arrays
    may be written to; they are contiguous then.
    """

    def __init__(
        self,
        group: AllstepGroup,
        key: str,
        named: Sequence[tuple[str, Tensor]],
        rule: Rule,
        *,
        in_place: bool,
        listener: Listener | None = None,
    ) -> None:
        self._slots = [Named(name, _slot(like)) for name, like in named]
        kind = _InPlace if in_place else _IntoBuffers
        self.exchange = kind(group, key, self._slots, rule, overlap=False, listener=listener)

    def reduce(
        self,
        arrays: Sequence[Tensor | None],
        weight: float | None = None,
        wanted: Wanted = NOTHING,
    ) -> list[Tensor | None]:
        """Return the reduced arrays; None for those that no rank has.

        `arrays`: in the order of `named`; None where this rank has no gradient, which counts as
        zero if another rank has one. `weight`, `wanted`: as for `Exchange.reduce`.
        """
        self._check(arrays)
        try:
            for slot, array in zip(self._slots, arrays, strict=True):
                slot.parameter.grad = array
            self.exchange.reduce(weight, wanted=wanted)
            return [slot.parameter.grad for slot in self._slots]
        finally:
            self._clear()

    def participate(self, weight: float | None = None, wanted: Wanted = NOTHING) -> None:
        """Contribute nothing to a `reduce` of the other ranks, after `join`."""
        self.exchange.reduce(weight, absent=True, wanted=wanted)
        self.exchange.norms()

    def close(self) -> None:
        """Drop what belongs to the group."""
        self.exchange.close()

    def _clear(self) -> None:
        """Drop the arrays, which belong to the framework."""
        for slot in self._slots:
            slot.parameter.grad = None

    def _check(self, arrays: Sequence[Tensor | None]) -> None:
        """Raise UserError if these are not the arrays that the list was made for."""
        if len(arrays) != len(self._slots):
            raise UserError(f"expected {len(self._slots)} arrays, found {len(arrays)}")
        for (name, slot), array in zip(self._slots, arrays, strict=True):
            if array is not None and (array.shape, array.dtype) != (slot.shape, slot.dtype):
                raise UserError(
                    f"array {name!r}: expected {slot.dtype} {list(slot.shape)}, found"
                    f" {array.dtype} {list(array.shape)}"
                )


class _Fixed(AllReduce):
    """Reduces slots, whose shapes and dtypes never change."""

    def _needs_its_layout(self, parameter: Parameter) -> bool:
        return False

    def _described(self) -> tuple[Any, ...]:
        return (id(self),)


class _InPlace(_Fixed):
    """Reduces arrays in their own memory."""


class _IntoBuffers(_Fixed):
    """Reduces gradients into buffers of our own, and leaves the given ones as they are."""

    def _prepare(self) -> None:
        self._buffers: list[_Buffer] = []
        self._is_free = [0.0] * _MAX_BUFFERS

    def _more_flags(self) -> list[float]:
        """Return which buffers this rank could use. All ranks must choose the same one, since they
        sum in the memory of each other.
        """
        flags = [float(buffer.is_free()) for buffer in self._buffers]
        return flags + [0.0] * (_MAX_BUFFERS - len(flags))

    def _note_flags(self, sums: list[float]) -> None:
        self._is_free = sums

    def _gradient(self, number: int, scale: float, absent: bool) -> Tensor:
        """Return what this rank adds: its gradient itself, or zero."""
        parameter = self.named[number].parameter
        if absent or parameter.grad is None or not scale:
            return torch.zeros((), dtype=parameter.dtype)
        return parameter.grad.detach()

    def _sum(self, bucket: Bucket, gradients: dict[int, Tensor], scale: float) -> None:
        for pack in self._free_buffer(bucket).packs:
            numbers = [number for number in pack.views if number in gradients]
            if numbers:
                self._sum_pack(pack, {number: gradients[number] for number in numbers}, scale)

    def _sum_pack(self, pack: Pack, gradients: dict[int, Tensor], scale: float) -> None:
        """Sum gradients of one dtype in the buffer; its views become the results."""
        if len(gradients) < len(pack.views):
            pack.flat.zero_()
        if self.rule.compress is None:
            self._measured_sum(pack.flat, self._copy_in(pack, gradients, scale))
        else:
            torch._foreach_copy_([pack.views[n] for n in gradients], list(gradients.values()))
            self._sum_compressed({number: pack.views[number] for number in gradients}, scale)
        for number in gradients:
            # A new tensor: the framework may keep it for longer than this step.
            self.named[number].parameter.grad = pack.views[number].detach()

    def _copy_in(self, pack: Pack, gradients: dict[int, Tensor], scale: float) -> float:
        """Copy gradients into the buffer; return the factor that is still to be applied.

        Large ones are scaled on the way, which saves a pass over their memory. Norms need the
        values before.
        """
        scales = scale != 1.0 and self.own is None and pack.flat.is_floating_point()
        small: list[int] = []
        for number, gradient in gradients.items():
            if scales and gradient.numel() >= _LARGE:
                torch.mul(gradient, scale, out=pack.views[number])
            else:
                small.append(number)
        if small:
            views = [pack.views[number] for number in small]
            torch._foreach_copy_(views, [gradients[number] for number in small])
            if scales:
                torch._foreach_mul_(views, scale)
        return 1.0 if scales else scale

    def _free_buffer(self, bucket: Bucket) -> "_Buffer":
        """Return a buffer whose results no rank uses any more, or a new one."""
        for buffer, count in zip(self._buffers, self._is_free, strict=False):
            if count == self.group.size():
                return buffer
        is_kept = len(self._buffers) < _MAX_BUFFERS
        buffer = _Buffer(self.group, self.named, bucket, is_shared=is_kept)
        if is_kept:
            self._buffers.append(buffer)
        return buffer


class _Buffer:
    """Memory for the results of one step, by dtype. `is_shared`: with the other ranks."""

    def __init__(
        self, group: AllstepGroup, named: Sequence[Named], bucket: Bucket, *, is_shared: bool
    ) -> None:
        kinds: dict[torch.dtype, list[int]] = {}
        for number in bucket.numbers:
            kinds.setdefault(named[number].parameter.dtype, []).append(number)
        self.packs = [
            make_pack(group if is_shared else None, named, numbers, ALIGNMENT)
            for numbers in kinds.values()
        ]
        self._own_uses = self._uses()

    def is_free(self) -> bool:
        """Return whether nothing outside this module refers to the memory."""
        return self._uses() == self._own_uses

    def _uses(self) -> list[int]:
        """Return the number of references to the memory of each pack."""
        storages = [pack.flat.untyped_storage() for pack in self.packs]
        return [torch._C._storage_Use_Count(storage._cdata) for storage in storages]


def _slot(like: Tensor) -> Parameter:
    """Return a parameter with the shape and dtype of `like`, and memory for one element."""
    return Parameter(without_values(like), requires_grad=False)


def without_values(like: Tensor) -> Tensor:
    """Return a tensor with the shape and dtype of `like`, and memory for one element."""
    return torch.zeros((), dtype=like.dtype, device=like.device).expand(like.shape)
