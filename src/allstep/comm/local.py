"""Collectives of ranks that share the memory of one host.

Every rank has a pool in the shared segment and a line of flags (see `wait`)::

    segment   | flags of all ranks | words of all ranks | pool of rank 0 | pool of rank 1 | ...

**Small** (up to `SMALL` bytes): every rank puts its tensor into its pool, publishes, waits, and adds up all pools by itself, in the
order of ranks. One exchange. Two places in the pool are used in turn: whoever writes the second place has seen everybody publish the first,
so whoever writes the first again knows that all have read it.

**Large**: in blocks, so that everything stays in the caches. Rank i owns slice i of each block. A turn of the pipeline::

    stage block k          my values of the slices that others own -> my pool
    reduce block k-1       my slice: mine + what the others staged, in the order of ranks -> my pool
    publish, wait          "staged k, reduced k-1"
    copy out block k-1     all slices, from their owners' pools -> my tensor

**Shared** (`shared_empty`): the tensors of all ranks lie in shared memory already, so nothing is staged. Rank i adds up slice i, block by
block, and writes the sum into the tensors of all. Two exchanges: all inputs are there; all sums are there.

One exchange per block, and the results have the same bits on every rank and in every run: the order of adding never changes.

**Mismatch.** The mark of each exchange is a checksum of the operation (its name, dtype, shape, reduction, root). Ranks that see
another mark than their own write down what they called, read what the others called, and raise the same `CollectiveMismatch`.

The arithmetic is torch's, on views of the shared memory.
"""

import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._distributed_c10d import AllreduceOptions, BarrierOptions, BroadcastOptions, ReduceOp, Work

from allstep.comm.mover import Mover
from allstep.comm.queue import Queue
from allstep.comm.segment import rounded
from allstep.comm.wait import Flags, control_bytes
from allstep.comm.work import DONE
from allstep.errors import CollectiveMismatch, CommError

RedOpType: Any = ReduceOp.RedOpType  # torch's stub shows an enumeration without members
SMALL = 64 << 10
_PLACE = 2 * SMALL  # two small places stand at the front of each pool
WORDS = 512  # bytes in which a rank says what it called
_BLOCK = 256 << 10  # bytes of a slice: the slices of a turn stay in the caches
_TURNS = 2
_BLOCK_BITS = 20  # the low bits of a mark say in which shared block a tensor lies; none for private memory

Combine = Callable[..., Any]
_COMBINE: dict[Any, Combine] = {
    RedOpType.SUM: torch.add,
    RedOpType.AVG: torch.add,
    RedOpType.PRODUCT: torch.mul,
    RedOpType.MIN: torch.minimum,
    RedOpType.MAX: torch.maximum,
    RedOpType.BAND: torch.bitwise_and,
    RedOpType.BOR: torch.bitwise_or,
    RedOpType.BXOR: torch.bitwise_xor,
}
_BITWISE = (RedOpType.BAND, RedOpType.BOR, RedOpType.BXOR)
_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
)
_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


class Plan(NamedTuple):
    """What an operation on so many elements of a dtype needs, worked out once and kept."""

    mark: int
    said: str
    places: tuple[tuple[Tensor, ...], tuple[Tensor, ...]]  # small: [turn][rank], views of the pools
    combine: Combine
    divide: bool
    shared: tuple[Tensor, ...] = ()  # large and in shared memory: the tensors of all ranks, flat


class SharedBlock(NamedTuple):
    """What one `shared_empty` made: a tensor of the same size on every rank, all of them visible to all."""

    number: int
    parts: Sequence[memoryview]  # by rank


class _MixedMemoryError(Exception):
    """The ranks agree on the operation, but not all of their tensors lie in the same shared memory: do it the private way."""


def segment_bytes(size: int, pool: int) -> int:
    """How large a segment must be for `size` ranks with pools of `pool` bytes."""
    return rounded(control_bytes(size)) + rounded(size * WORDS) + size * rounded(pool)


class LocalMover(Mover):
    """Moves through shared memory what it can; declines the rest.

    memory: the segment's view. timeout: seconds after which a rank that does not come is an error.
    """

    def __init__(
        self, memory: memoryview, flags: Flags, words: memoryview, pools: Sequence[memoryview], timeout: float
    ) -> None:
        self.flags = flags
        self.rank, self.size = flags.rank, flags.size
        self.timeout = timeout
        self.words = words
        self.pools = list(pools)
        self.queue = Queue()
        self._memory = memory
        self._plans: dict[Any, Plan | None] = {}
        self._blocks: dict[int, SharedBlock] = {}  # by the address of our own part
        self.num_blocks = 0
        self._turn = 0
        self._broken: CommError | None = None

    # What torch asks for

    def all_reduce(self, tensor: Tensor, opts: AllreduceOptions) -> Work | None:
        reduce_op = opts.reduceOp
        plan = self._plan("all_reduce", tensor, reduce_op, -1)
        if plan is None:
            return None
        if self._blocks and not plan.places[0]:
            plan = self._shared_plan(tensor, plan)
        if opts.asyncOp:
            return self.queue.later(lambda: self._all_reduce(tensor, plan), [tensor])
        self.queue.now(self._all_reduce, tensor, plan)
        return DONE

    def broadcast(self, tensor: Tensor, opts: BroadcastOptions) -> Work | None:
        plan = self._plan("broadcast", tensor, None, opts.rootRank)
        if plan is None:
            return None
        root = opts.rootRank
        if opts.asyncOp:
            return self.queue.later(lambda: self._broadcast(tensor, plan, root), [tensor])
        self.queue.now(self._broadcast, tensor, plan, root)
        return DONE

    def barrier(self, opts: BarrierOptions) -> Work | None:
        if opts.asyncOp:
            return self.queue.later(self._barrier, [])
        self.queue.now(self._barrier)
        return DONE

    # How it is done

    def _all_reduce(self, tensor: Tensor, plan: Plan) -> None:
        if self._broken is not None:
            raise self._broken
        flat = tensor.detach().view(-1) if tensor.is_contiguous() else tensor.detach().reshape(-1)
        try:
            try:
                self._reduce_by(plan, flat)
            except _MixedMemoryError:
                self._reduce_by(plan._replace(mark=_private_mark(plan.mark), shared=()), flat)
        except CommError as error:
            raise self._remember(error, plan) from None
        if plan.divide:
            flat.div_(self.size)
        if not tensor.is_contiguous():
            tensor.detach().copy_(flat.view(tensor.shape))

    def _reduce_by(self, plan: Plan, flat: Tensor) -> None:
        if plan.places[0]:
            self._small(flat, plan)
        elif plan.shared:
            self._shared(plan)
        else:
            self._large(flat, plan)

    def _shared(self, plan: Plan) -> None:
        """Add up our slice of all tensors, where they lie, and give everybody the sum."""
        self._meet(plan)
        tensors, combine = plan.shared, plan.combine
        numel = tensors[0].numel()
        each = -(-numel // self.size // 64) * 64
        step = _BLOCK // tensors[0].element_size()
        end = min(numel, (self.rank + 1) * each)
        for start in range(self.rank * each, end, step):
            first, *rest = [tensor[start : min(end, start + step)] for tensor in tensors]
            for other in rest:
                combine(first, other, out=first)
            for other in rest:
                other.copy_(first)
        self._meet(plan)

    def _small(self, flat: Tensor, plan: Plan) -> None:
        self._turn = turn = 1 - self._turn
        places = plan.places[turn]
        places[self.rank].copy_(flat)
        self._meet(plan)
        combine = plan.combine
        combine(places[0], places[1], out=flat)
        for place in places[2:]:
            combine(flat, place, out=flat)

    def _large(self, flat: Tensor, plan: Plan) -> None:
        """The pipeline of the module's docstring. `first` is where block k begins, in elements."""
        slice_numel = self._slice_numel(flat)
        block = slice_numel * self.size
        num_blocks = -(-flat.numel() // block)
        staged, reduced = self._areas(flat, slice_numel)
        for k in range(num_blocks + 1):
            turn = k % _TURNS
            if k < num_blocks:
                for owner in range(self.size):
                    if owner != self.rank:
                        part = _slice(flat, k * block, owner, slice_numel)
                        staged[turn][self.rank][owner][: part.numel()].copy_(part)
            if k > 0:
                self._reduce_mine(flat, (k - 1) * block, slice_numel, staged[1 - turn], reduced[1 - turn], plan.combine)
            self._meet(plan)
            if k > 0:
                for owner in range(self.size):
                    part = _slice(flat, (k - 1) * block, owner, slice_numel)
                    part.copy_(reduced[1 - turn][owner][: part.numel()])
        self._meet(plan)  # nobody may stage the next operation while another still copies out of this one

    def _reduce_mine(
        self,
        flat: Tensor,
        first: int,
        slice_numel: int,
        staged: Sequence[Any],
        reduced: Sequence[Tensor],
        combine: Combine,
    ) -> None:
        mine = _slice(flat, first, self.rank, slice_numel)
        if not mine.numel():
            return
        values = [mine if rank == self.rank else staged[rank][self.rank][: mine.numel()] for rank in range(self.size)]
        out = reduced[self.rank][: mine.numel()]
        combine(values[0], values[1], out=out)
        for value in values[2:]:
            combine(out, value, out=out)

    def _slice_numel(self, flat: Tensor) -> int:
        """Elements of a slice: as the caches like it, as the pool allows, and no more than there are."""
        room = (len(self.pools[0]) - _PLACE) // (_TURNS * (self.size + 1))
        nbytes = min(_BLOCK, room) // 64 * 64
        needed = -(-flat.numel() // self.size)
        return min(nbytes // flat.element_size(), -(-needed // 64) * 64)

    def _areas(self, flat: Tensor, slice_numel: int) -> tuple[list[list[list[Tensor]]], list[list[Tensor]]]:
        """staged[turn][rank][owner] and reduced[turn][rank]: views of the pools."""
        nbytes = slice_numel * flat.element_size()

        def at(rank: int, index: int) -> Tensor:
            return torch.frombuffer(
                self.pools[rank], dtype=flat.dtype, count=slice_numel, offset=_PLACE + index * nbytes
            )

        per_turn = self.size + 1
        ranks = range(self.size)
        staged = [[[at(rank, turn * per_turn + owner) for owner in ranks] for rank in ranks] for turn in range(_TURNS)]
        reduced = [[at(rank, turn * per_turn + self.size) for rank in ranks] for turn in range(_TURNS)]
        return staged, reduced

    def _broadcast(self, tensor: Tensor, plan: Plan, root: int) -> None:
        if self._broken is not None:
            raise self._broken
        flat = tensor.detach().view(-1) if tensor.is_contiguous() else tensor.detach().reshape(-1)
        try:
            if plan.places[0]:
                self._turn = turn = 1 - self._turn
                if self.rank == root:
                    plan.places[turn][root].copy_(flat)
                self._meet(plan)
                if self.rank != root:
                    flat.copy_(plan.places[turn][root])
            else:
                self._broadcast_blocks(flat, plan, root)
        except CommError as error:
            raise self._remember(error, plan) from None
        if not tensor.is_contiguous() and self.rank != root:
            tensor.detach().copy_(flat.view(tensor.shape))

    def _broadcast_blocks(self, flat: Tensor, plan: Plan, root: int) -> None:
        """The root writes block k into one half of its pool while the others read block k-1 from the other."""
        numel = min(4 * _BLOCK, (len(self.pools[0]) - _PLACE) // _TURNS // 64 * 64) // flat.element_size()
        halves = [
            torch.frombuffer(
                self.pools[root], dtype=flat.dtype, count=numel, offset=_PLACE + turn * numel * flat.element_size()
            )
            for turn in range(_TURNS)
        ]
        num_blocks = -(-flat.numel() // numel)
        for k in range(num_blocks + 1):
            if self.rank == root and k < num_blocks:
                part = flat[k * numel : (k + 1) * numel]
                halves[k % _TURNS][: part.numel()].copy_(part)
            if self.rank != root and k > 0:
                part = flat[(k - 1) * numel : k * numel]
                part.copy_(halves[(k - 1) % _TURNS][: part.numel()])
            self._meet(plan)

    def _barrier(self) -> None:
        if self._broken is not None:
            raise self._broken
        plan = Plan(zlib.crc32(b"barrier") << _BLOCK_BITS, "barrier", ((), ()), torch.add, False)
        try:
            self._meet(plan)
        except CommError as error:
            raise self._remember(error, plan) from None

    # Exchanges

    def _meet(self, plan: Plan) -> None:
        """Publish what we have written; go on when everybody has."""
        flags = self.flags
        flags.publish(plan.mark)
        flags.wait(self.timeout)
        if flags.odd_one(plan.mark):
            if len({_private_mark(mark) for mark in flags.marks()}) == 1:
                raise _MixedMemoryError
            self._mismatch(plan)

    def _mismatch(self, plan: Plan) -> None:
        """All ranks are here, since each of them saw another mark than its own: tell what we called, and read the others' words."""
        said = plan.said.encode()[: WORDS - 1]
        start = self.rank * WORDS
        self.words[start : start + len(said) + 1] = said + b"\0"
        self.flags.publish(0)
        self.flags.wait(self.timeout)
        calls = [
            bytes(self.words[rank * WORDS : (rank + 1) * WORDS]).partition(b"\0")[0].decode()
            for rank in range(self.size)
        ]
        self.flags.publish(0)
        self.flags.wait(self.timeout)
        table = "\n".join(f"  rank {rank}: {call}" for rank, call in enumerate(calls))
        raise CollectiveMismatch(f"ranks called different collectives:\n{table}", rank=self.rank, op=plan.said)

    def _remember(self, error: CommError, plan: Plan) -> CommError:
        """After a lost peer or a time-out the ranks no longer agree on how far they are: everything after it fails at once."""
        error.op = error.op or plan.said.partition("(")[0]
        error.tensor = error.tensor or plan.said
        if not isinstance(error, CollectiveMismatch):
            error.args = (f"{plan.said}: {error}",)
            self._broken = error
        return error

    # Plans

    def _plan(self, name: str, tensor: Tensor, op: ReduceOp | None, root: int) -> Plan | None:
        kind = None if op is None else op.op if hasattr(op, "op") else op
        key = (name, tensor.dtype, tensor.shape, kind, root, tensor.layout)
        try:
            return self._plans[key]
        except KeyError:
            if len(self._plans) > 1000:
                self._plans.clear()
            plan = self._plans[key] = self._make_plan(name, tensor, kind, root)
            return plan

    def _make_plan(self, name: str, tensor: Tensor, kind: Any, root: int) -> Plan | None:
        if self.size == 1 or tensor.layout != torch.strided or not tensor.numel() or not _can(tensor.dtype, kind):
            return None
        reduction = f", {kind.name}" if kind is not None else f", root {root}"
        said = f"{name}({_short(tensor.dtype)} {list(tensor.shape)}{reduction})"
        small = tensor.numel() * tensor.element_size() <= SMALL
        places = (self._places(tensor, 0), self._places(tensor, 1)) if small else ((), ())
        mark = zlib.crc32(said.encode()) << _BLOCK_BITS
        return Plan(mark, said, places, _COMBINE.get(kind, torch.add), kind == RedOpType.AVG)

    def add_block(self, parts: Sequence[memoryview], address: int) -> None:
        """Make memory known in which every rank has a tensor. All ranks call it in the same order."""
        self.num_blocks += 1
        self._blocks[address] = SharedBlock(self.num_blocks % (1 << _BLOCK_BITS) or 1, parts)

    def forget_block(self, address: int) -> None:
        """The tensor is gone; so are the plans that would keep its memory."""
        block = self._blocks.pop(address, None)
        for key in [key for key in self._plans if block is not None and key[0] == block.number]:
            del self._plans[key]

    def _shared_plan(self, tensor: Tensor, plan: Plan) -> Plan:
        """The plan with the tensors of all ranks in it, when this tensor lies in shared memory."""
        block = self._blocks.get(tensor.untyped_storage().data_ptr())
        if block is None or not tensor.is_contiguous():
            return plan
        offset = int(tensor.storage_offset()) * tensor.element_size()
        key = (block.number, offset, plan.mark)
        found = self._plans.get(key)
        if found is None:
            tensors = tuple(
                torch.frombuffer(part, dtype=tensor.dtype, count=tensor.numel(), offset=offset) for part in block.parts
            )
            mark = plan.mark | (zlib.crc32(f"{block.number} {offset}".encode()) % ((1 << _BLOCK_BITS) - 1) + 1)
            found = self._plans[key] = plan._replace(mark=mark, shared=tensors)
        return found

    def _places(self, tensor: Tensor, turn: int) -> tuple[Tensor, ...]:
        numel = tensor.numel()
        return tuple(
            torch.frombuffer(pool, dtype=tensor.dtype, count=numel, offset=turn * SMALL) for pool in self.pools
        )


def _can(dtype: torch.dtype, kind: Any) -> bool:
    """Whether torch's own kernels compute this reduction as it is; the rest is left to others."""
    if dtype not in _DTYPES or (kind is not None and kind not in _COMBINE):
        return False
    if kind in _BITWISE:
        return dtype not in _FLOATS
    return not (kind == RedOpType.AVG and dtype not in _FLOATS)


def _private_mark(mark: int) -> int:
    return mark >> _BLOCK_BITS << _BLOCK_BITS


def _slice(flat: Tensor, first: int, owner: int, slice_numel: int) -> Tensor:
    start = first + owner * slice_numel
    return flat[start : start + slice_numel]


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
