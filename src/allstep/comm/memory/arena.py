"""The layout of the shared memory of a group, and the barrier through which ranks exchange data.

    memory    | flags of all ranks | texts of all ranks | pool of rank 0 | pool of rank 1 | ...
    texts     | for each rank: description of its call, failure of the group
    pool      | small place 0 | small place 1 | blocks ...

A rank writes only into its own pool, texts and flags, and reads those of all ranks. `barrier` is
the only synchronization: publish what this rank has written, and wait until all ranks have
published. Double buffering needs no further barrier: between two writes to the same place a rank
passes a barrier of the other place, which the others enter only after they have read this one.

**Mismatch.** Each barrier carries a mark, a checksum of the operation. Ranks that see a mark other
than their own write what they called, and in which line of the program, read what the others
called, and raise the same `CollectiveMismatch`. The group remains usable.

**Failure.** The second text of a rank is for the guard: a rank that knows why the group has failed
posts it there for the others.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from allstep.comm.health.failure import Failure, from_json, op_and_tensor
from allstep.comm.health.stack_lines import callers_line
from allstep.comm.memory.kept import Sizes
from allstep.comm.memory.segment import rounded
from allstep.comm.memory.wait_flags import Flags, control_bytes
from allstep.errors import CollectiveMismatch

# Largest tensor, in bytes, that is exchanged at once through a small place.
SMALL = 64 << 10
# Bytes for the description of a rank's call, and for the failure of the group.
_CALL_BYTES, _FAILURE_BYTES = 1024, 3072
TEXT_BYTES = _CALL_BYTES + _FAILURE_BYTES
# Places used alternately (double buffering).
TURNS = 2
# Bytes that stay in the caches while they are staged, added and copied.
_BLOCK = 1 << 20
# In a smaller block the barrier takes longer than the sum.
_MIN_BLOCK = 256 << 10
_FRONT = TURNS * SMALL
_MAX_CACHED_BLOCKS = 100
# The low bits of a mark identify the shared block that contains a tensor; 0 for private memory.
BLOCK_BITS = 20


class Call(NamedTuple):
    """What the ranks must agree on: `mark` to compare, and `text` for error messages."""

    mark: int
    text: str


class MixedMemory(Exception):
    """Ranks agree on the operation, but some of their tensors are not in the same shared memory."""


def arena_sizes(size: int, pool: int) -> Sizes:
    """Return the sizes of the memory of `size` ranks with pools of `pool` bytes."""
    return Sizes(rounded(control_bytes(size)) + size * TEXT_BYTES, pool)


def flags_and_texts(control: memoryview, size: int) -> tuple[memoryview, memoryview]:
    """Return the two parts of the control memory of `size` ranks."""
    texts_at = rounded(control_bytes(size))
    return control[: control_bytes(size)], control[texts_at : texts_at + size * TEXT_BYTES]


def block_bytes(level_2: int | None) -> int:
    """Return the size of a block that fits a core's second-level cache together with its copy.

    `level_2` is the size of that cache in bytes; None if unknown.
    """
    return _BLOCK if level_2 is None else max(_MIN_BLOCK, min(_BLOCK, level_2 // 2))


class Arena:
    """The shared memory of a group, seen from one rank.

    `block` is the number of bytes that two ranks exchange at a time; it must be the same on both
    (`block_bytes`).
    """

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
        """Publish what this rank has written, and wait until all ranks have published.

        Raises `CollectiveMismatch` on all ranks if their calls differ.
        """
        flags = self.flags
        flags.publish(call.mark)
        flags.wait(call.text)
        if flags.has_other_mark(call.mark):
            self._raise_mismatch(call)

    def small_places(self, dtype: torch.dtype, numel: int) -> tuple[tuple[Tensor, ...], ...]:
        """Return `places[turn][rank]`, views of the pools for tensors of at most `SMALL` bytes."""
        return tuple(
            tuple(
                torch.frombuffer(pool, dtype=dtype, count=numel, offset=turn * SMALL)
                for pool in self.pools
            )
            for turn in range(TURNS)
        )

    def block_numel(
        self, dtype: torch.dtype, num_blocks: int, max_numel: int, nbytes: int = _BLOCK
    ) -> int:
        """Return the elements of a block when a rank needs `num_blocks` blocks at a time.

        That is `nbytes` or what the pool allows, and at most `max_numel` rounded up to 64 elements.
        """
        room = (len(self.pools[0]) - _FRONT) // (TURNS * num_blocks)
        numel = min(nbytes, room) // 64 * 64 // dtype.itemsize
        return max(1, min(numel, -(-max_numel // 64) * 64))

    def blocks(self, dtype: torch.dtype, numel: int, num_blocks: int) -> list[list[list[Tensor]]]:
        """Return `blocks[turn][rank][index]`, views of the pools after the small places."""
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
        """Exchange what the ranks called, and raise the same error on all of them.

        All ranks get here, since each has seen a mark that is not its own.
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
        """Return the user's number for a rank of this host."""
        return self.flags.guard.names[self.flags.ranks[rank]]

    # Failures

    def post(self, failure: Failure) -> None:
        """Publish to the ranks of this host why the group has failed."""
        self._write(_CALL_BYTES, _FAILURE_BYTES, failure.to_json(_FAILURE_BYTES - 1))
        self.flags.set_failed()

    def posted(self) -> Failure | None:
        """Return the failure that another rank of this host has posted, if any."""
        rank = self.flags.failed_rank()
        return (
            from_json(self._read(rank * TEXT_BYTES + _CALL_BYTES, _FAILURE_BYTES))
            if rank is not None
            else None
        )

    def _write(self, at: int, room: int, text: str) -> None:
        """Write into our own texts, at offset `at`, at most `room` bytes."""
        data = text.encode()[: room - 1] + b"\0"
        start = self.rank * TEXT_BYTES + at
        self.texts[start : start + len(data)] = data

    def _read(self, at: int, room: int) -> str:
        return bytes(self.texts[at : at + room]).partition(b"\0")[0].decode(errors="replace")


def private_mark(mark: int) -> int:
    """Return the mark of the same operation on private memory."""
    return mark >> BLOCK_BITS << BLOCK_BITS
