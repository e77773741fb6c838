"""Small collectives of the parties that are not lost, in shared memory: numbers, and averages.

A process group cannot be used: each of its operations fails once a rank is lost. Here a barrier
returns which parties have not come, and all others agree on that, because a party that has come
leaves its mark in memory, whatever happens to it afterwards.

    | numbers of party 0, place A | place B | numbers of party 1 ... | tensors of party 0 | ...

Two places are used in turn, so that a party can write for the next call while others still read.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from allstep.errors import UserError
from allstep.kvstore.memory.key_memory import aligned, tensor_in

Barrier = Callable[[], set[int]]
"""Waits for all living parties; returns those that are lost and have not come."""

_HALF = (torch.float16, torch.bfloat16)


class Gathering:
    """Numbers and averages of `size` parties, seen from party `rank`.

    num_values: numbers of a party at most. averaged: the tensors to average, which change in place.
    """

    def __init__(
        self,
        memory: memoryview,
        rank: int,
        size: int,
        num_values: int,
        averaged: Sequence[Tensor],
        barrier: Barrier,
    ) -> None:
        self._rank, self._size, self._barrier = rank, size, barrier
        self._num_values, self._calls = num_values, 0
        self.averaged = [each.detach() for each in averaged]
        flat = tensor_in(memory, 0, torch.float64, size * 2 * (1 + num_values))
        self._numbers = flat.view(size, 2, 1 + num_values)
        at, self._copies = aligned(flat.nbytes), list[list[Tensor]]()
        for _ in range(size):
            mine = []
            for each in averaged:
                mine.append(tensor_in(memory, at, each.dtype, each.numel()).view(each.shape))
                at += _room(each)
            self._copies.append(mine)

    @staticmethod
    def nbytes(size: int, num_values: int, averaged: Sequence[Tensor]) -> int:
        """Return the bytes of memory for the arguments of the constructor."""
        numbers = aligned(size * 2 * (1 + num_values) * 8)
        return numbers + size * sum(map(_room, averaged))

    def gather(self, values: Sequence[float] | Tensor | None) -> dict[int, Tensor]:
        """Return the numbers that each living party passes, by rank. A collective."""
        given = torch.as_tensor([] if values is None else values, dtype=torch.float64).flatten()
        if len(given) > self._num_values:
            raise UserError(
                f"gather of {len(given)} numbers, but there is room for {self._num_values}; set"
                " Options.num_values"
            )
        place = self._calls % 2
        self._calls += 1
        mine = self._numbers[self._rank, place]
        mine[0] = len(given)
        mine[1 : 1 + len(given)] = given
        lost = self._barrier()
        found = {}
        for rank in range(self._size):
            if rank not in lost:
                theirs = self._numbers[rank, place]
                found[rank] = theirs[1 : 1 + int(theirs[0])].clone()
        return found

    def contribute(self) -> None:
        """Copy the tensors to be averaged where the others can read them, before a `gather`."""
        for copy, each in zip(self._copies[self._rank], self.averaged, strict=True):
            copy.copy_(each)

    def average(self, ranks: Sequence[int]) -> None:
        """Replace the tensors by the mean of these parties', added in the order of the ranks."""
        for place, each in enumerate(self.averaged):
            exact = _exact(each.dtype)
            total = self._copies[ranks[0]][place].to(exact, copy=True)
            for rank in ranks[1:]:
                total.add_(self._copies[rank][place])
            total.div_(len(ranks))
            each.copy_(total if each.is_floating_point() else total.round_())


def _exact(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which tensors are added; whole numbers have a mean, too."""
    if dtype in _HALF:
        return torch.float32
    return dtype if dtype.is_floating_point else torch.float64


def _room(each: Tensor) -> int:
    return aligned(max(1, each.numel() * each.element_size()))
