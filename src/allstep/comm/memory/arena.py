"""The place in shared memory where the ranks of a group exchange data, and the exchange itself.

    segment   | flags of all ranks | words of all ranks | pool of rank 0 | pool of rank 1 | ...
    pool      | small place 0 | small place 1 | blocks ...

A rank writes only into its own pool and its own flags, and reads everybody's. `meet` is the one
exchange: publish what we have written, and go on when everybody has. Whoever uses two places in
turn needs nothing else: he who writes into a place again has met the others once since they were
told to read it, so they have read it.

**Mismatch.** With each exchange goes a mark, a checksum of what the operation is. Ranks that see
another mark than their own write down what they called and in which line of the program, read what
the others called, and raise the same `CollectiveMismatch`. Afterwards the group is usable as
before.

**Failure.** Behind those words is a board for the guard: a rank that knows why the group has failed
posts it there for the others.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from allstep.comm.health.failure import Failure, from_json, op_and_tensor
from allstep.comm.health.stack_lines import callers_line
from allstep.comm.memory.flags import Flags, control_bytes
from allstep.comm.memory.segment import rounded
from allstep.errors import CollectiveMismatch

SMALL = 64 << 10  # bytes up to which a tensor goes through a small place at once
_CALL_BYTES, _FAILURE_BYTES = (
    1024,
    3072,
)  # bytes in which a rank says what it called, and why the group has failed
TEXT_BYTES = _CALL_BYTES + _FAILURE_BYTES
TURNS = 2
_BLOCK = 1 << 20  # bytes that stay in the caches while they are staged, added and copied
_MIN_BLOCK = 256 << 10  # in a smaller block the exchange takes longer than the sum
_FRONT = TURNS * SMALL
_MAX_CACHED_BLOCKS = 100
BLOCK_BITS = (
    20  # the low bits of a mark say in which shared block a tensor lies; none for private memory
)


class Call(NamedTuple):
    """What the ranks must agree on: a mark to compare, and words for people."""

    mark: int
    text: str


class MixedMemory(Exception):
    """The ranks agree on the operation, but not all of their tensors lie in the same shared memory."""


def segment_bytes(size: int, pool: int) -> int:
    """How large a segment must be for `size` ranks with pools of `pool` bytes."""
    return rounded(control_bytes(size)) + rounded(size * TEXT_BYTES) + size * rounded(pool)


def block_bytes(level_2: int | None) -> int:
    """Size of a block that fits the second-level cache of a core (`level_2` bytes; None: unknown)
    next to its copy."""
    return _BLOCK if level_2 is None else max(_MIN_BLOCK, min(_BLOCK, level_2 // 2))


class Arena:
    """A rank's view of it. block: bytes of a block that two ranks exchange at a time, the same on
    both (`block_bytes`)."""

    def __init__(
        self, flags: Flags, texts: memoryview, pools: Sequence[memoryview], block: int = _BLOCK
    ) -> None:
        self.flags = flags
        self.rank, self.size = flags.rank, flags.size
        self.others = [rank for rank in range(self.size) if rank != self.rank]
        self.texts = texts
        self.pools = list(pools)
        self.block = block
        self.turn = 0
        self._blocks: dict[tuple[torch.dtype, int, int], list[list[list[Tensor]]]] = {}

    def barrier(self, call: Call) -> None:
        """Publish what we have written; go on when everybody has."""
        flags = self.flags
        flags.publish(call.mark)
        flags.wait(call.text)
        if flags.has_other_mark(call.mark):
            self._raise_mismatch(call)

    def small_places(self, dtype: torch.dtype, numel: int) -> tuple[tuple[Tensor, ...], ...]:
        """places[turn][rank], for tensors of at most `SMALL` bytes."""
        return tuple(
            tuple(
                torch.frombuffer(pool, dtype=dtype, count=numel, offset=turn * SMALL)
                for pool in self.pools
            )
            for turn in range(TURNS)
        )

    def block_numel(
        self, dtype: torch.dtype, num_blocks: int, most: int, nbytes: int = _BLOCK
    ) -> int:
        """Elements of a block when a rank needs `num_blocks` of them a turn: as the caches like it
        and the pool allows, at most `most`."""
        room = (len(self.pools[0]) - _FRONT) // (TURNS * num_blocks)
        numel = min(nbytes, room) // 64 * 64 // dtype.itemsize
        return max(1, min(numel, -(-most // 64) * 64))

    def blocks(self, dtype: torch.dtype, numel: int, num_blocks: int) -> list[list[list[Tensor]]]:
        """blocks[turn][rank][index]: views of the pools behind the small places."""
        key = (dtype, numel, num_blocks)
        found = self._blocks.get(key)
        if found is None:
            if len(self._blocks) > _MAX_CACHED_BLOCKS:
                self._blocks.clear()
            found = self._blocks[key] = self._cut(*key)
        return found

    def _cut(self, dtype: torch.dtype, numel: int, num_blocks: int) -> list[list[list[Tensor]]]:
        nbytes = numel * dtype.itemsize

        def at(rank: int, index: int) -> Tensor:
            return torch.frombuffer(
                self.pools[rank], dtype=dtype, count=numel, offset=_FRONT + index * nbytes
            )

        return [
            [
                [at(rank, turn * num_blocks + index) for index in range(num_blocks)]
                for rank in range(self.size)
            ]
            for turn in range(TURNS)
        ]

    def _raise_mismatch(self, call: Call) -> None:
        """Some rank gave another mark.

        All ranks are here, since each of them saw one that is not its own.
        """
        if len({private_mark(mark) for mark in self.flags.marks()}) == 1:
            raise MixedMemory
        line = callers_line()
        self._write(0, _CALL_BYTES, f"{call.text} at {line}" if line else call.text)
        self._barrier_without_mark(call)
        table = "\n".join(
            f"  rank {self._name(rank)}: {self._read(rank * TEXT_BYTES, _CALL_BYTES)}"
            for rank in range(self.size)
        )
        self._barrier_without_mark(call)
        op, tensor = op_and_tensor(call.text)
        raise CollectiveMismatch(
            f"ranks called different collectives:\n{table}",
            rank=self._name(self.rank),
            op=op,
            tensor=tensor,
        )

    def _barrier_without_mark(self, call: Call) -> None:
        self.flags.publish(0)
        self.flags.wait(call.text)

    def _name(self, rank: int) -> int:
        """The number under which the user knows a rank of this host."""
        return self.flags.guard.names[self.flags.ranks[rank]]

    # The board

    def post(self, failure: Failure) -> None:
        """Tell the ranks of this host why the group has failed."""
        self._write(_CALL_BYTES, _FAILURE_BYTES, failure.to_json(_FAILURE_BYTES - 1))
        self.flags.set_failed()

    def posted(self) -> Failure | None:
        """What another rank of this host has posted."""
        rank = self.flags.failed_rank()
        return (
            from_json(self._read(rank * TEXT_BYTES + _CALL_BYTES, _FAILURE_BYTES))
            if rank is not None
            else None
        )

    def _write(self, at: int, room: int, text: str) -> None:
        """Into our own words."""
        data = text.encode()[: room - 1] + b"\0"
        start = self.rank * TEXT_BYTES + at
        self.texts[start : start + len(data)] = data

    def _read(self, at: int, room: int) -> str:
        return bytes(self.texts[at : at + room]).partition(b"\0")[0].decode(errors="replace")


def private_mark(mark: int) -> int:
    """The mark of the same operation on private memory."""
    return mark >> BLOCK_BITS << BLOCK_BITS
