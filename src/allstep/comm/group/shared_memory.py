"""The transport for ranks that share the memory of a host: which operations it takes, and how each is prepared.

The procedures that ranks then run together, on one host and over several, are in `procedures`.

For each kind of call (operation, dtype, shape, reduction) a plan is worked out once and kept: the mark by which ranks compare what they
call, the views of the pools, torch's function for the reduction. A call that waits is then carried out by the caller (`queue.now`), one
that does not is put in line. What is not taken here (sparse or empty tensors, reductions that torch's kernels do not compute, gathers
to one rank, uneven splits: all that the ranks cannot decide alike from what each of them sees) returns None, and Gloo does it, after
the ranks of the host have met and found that they all call it (`carry`).
"""

import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    ReduceOptions,
    ReduceScatterOptions,
    Work,
    _make_nccl_premul_sum,
)

from allstep.comm.group import across_hosts as crossing
from allstep.comm.group import procedures
from allstep.comm.group.across_hosts import Crossing
from allstep.comm.group.host_map import Layout
from allstep.comm.group.plan import (
    COMBINE,
    Plan,
    RedOpType,
    call_of,
    can,
    finish,
    flattened,
)
from allstep.comm.group.traced import RecordedArena, RecordedCrossing, recorded
from allstep.comm.health.failure import Operation
from allstep.comm.health.guard import Guard
from allstep.comm.memory import copy as copying
from allstep.comm.memory import reduce as summing
from allstep.comm.memory.arena import BLOCK_BITS, SMALL, Arena, Call
from allstep.comm.op.describe import first_tensor, kind_of, words, words_of_any
from allstep.comm.op.queue import Queue
from allstep.comm.op.reduction import recipe_for
from allstep.comm.op.transport import Mover
from allstep.comm.op.work import DONE
from allstep.comm.timeline import recorder

_MOST_PLANS = 1000
_SCALED = _make_nccl_premul_sum(1.0)  # only its kind counts
_BARRIER = call_of("barrier")


class SharedBlock(NamedTuple):
    """What one `shared_empty` made: a tensor of the same size on every rank, all of them visible to all."""

    number: int
    parts: Sequence[memoryview]  # by rank


class LocalMover(Mover):
    """Moves through shared memory what it can; declines the rest.

    layout: which ranks of the group are where. way: to the other hosts when there are several; then all_reduce and barrier are taken.
    """

    def __init__(self, arena: Arena, layout: Layout, guard: Guard, way: Crossing | None = None) -> None:
        self.arena = arena
        self.flags = arena.flags
        self.layout = layout
        self.rank, self.size = layout.rank, layout.size
        self.way = way = None if way is None else RecordedCrossing(way.num_slices, way.lane)
        self.queue = Queue()
        self.num_blocks = 0
        self._plans: dict[Any, Plan | None] = {}
        self._blocks: dict[int, SharedBlock] = {}  # by the address of our own part
        self._guard = guard
        self._small = procedures.small if way is None else partial(procedures.small_across, way)
        self._large_or_shared = (
            procedures.large_or_shared if way is None else partial(procedures.large_or_shared_across, way)
        )

    @cached_property
    def name(self) -> str:
        """The name of the group, as torch knows it."""
        groups = dist.distributed_c10d._world.pg_names.items()
        return next((name for group, name in groups if getattr(group, "local", None) is self), "?")

    def set_timeout(self, timeout: timedelta) -> None:
        if self.way is not None and self.way.lane is not None:
            self.way.lane.mover.set_timeout(timeout)

    def close(self) -> None:
        self.queue.close()

    # What torch asks for

    def all_reduce(self, tensor: Tensor, opts: AllreduceOptions) -> Work | None:
        plan = self._plan("all_reduce", tensor, opts.reduceOp)
        if plan is None:
            return None
        if self._blocks and not plan.places:
            plan = self._shared_plan(tensor, plan)
        scale = _factor(opts) if plan.scaled else None
        if opts.asyncOp:
            return self.queue.later(lambda: self._all_reduce(tensor, plan, scale), [tensor])
        self.queue.now(self._all_reduce, tensor, plan, scale)
        return DONE

    def sum_scaled(self, tensor: Tensor, scale: float) -> bool:
        """The sum over ranks, of each rank's tensor times its own scale, in place; False where this is not ours to do."""
        plan = self._plan("all_reduce", tensor, _SCALED)
        if plan is None:
            return False
        if self._blocks and not plan.places:
            plan = self._shared_plan(tensor, plan)
        self.queue.now(self._all_reduce, tensor, plan, None if scale == 1.0 else scale)
        return True

    def all_reduce_coalesced(self, tensors: Sequence[Tensor], opts: AllreduceOptions) -> Work | None:
        plans = [self._plan("all_reduce", tensor, opts.reduceOp) for tensor in tensors]
        if any(plan is None for plan in plans):
            return None

        def act() -> None:
            for tensor, plan in zip(tensors, plans, strict=True):
                assert plan is not None
                self._all_reduce(tensor, plan, _factor(opts) if plan.scaled else None)

        return self.queue.later(act, tensors)

    def reduce(self, tensor: Tensor, opts: ReduceOptions) -> Work | None:
        root = opts.rootRank
        plan = self._plan("reduce", tensor, opts.reduceOp, f", to {root}")
        if plan is None:
            return None
        return self._do(opts, lambda: self._reduce(tensor, plan, root == self.rank), [tensor])

    def broadcast(self, tensor: Tensor, opts: BroadcastOptions) -> Work | None:
        root = opts.rootRank
        plan = self._plan("broadcast", tensor, None, f", from {root}")
        if plan is None:
            return None
        return self._do(opts, lambda: self._broadcast(tensor, plan, root), [tensor])

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor, opts: AllgatherOptions) -> Work | None:
        sizes = f", {[output.numel() for output in outputs]}"
        plan = self._plan("all_gather", tensor, None, sizes, sizes_differ=True)
        if plan is None or not self._fit(outputs, tensor):
            return None
        return self._do(opts, lambda: self._all_gather(outputs, tensor, plan), outputs)

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: AllgatherOptions) -> Work | None:
        plan = self._plan("all_gather_single", tensor, None)
        if plan is None or output.numel() != self.size * tensor.numel() or output.dtype != tensor.dtype:
            return None
        return self._do(opts, lambda: self._all_gather_single(output, tensor, plan), [output])

    def reduce_scatter(self, output: Tensor, tensors: Sequence[Tensor], opts: ReduceScatterOptions) -> Work | None:
        sizes = f", {[tensor.numel() for tensor in tensors]}"
        plan = self._plan("reduce_scatter", output, opts.reduceOp, sizes, sizes_differ=True)
        if plan is None or not self._fit(tensors, output):
            return None
        return self._do(opts, lambda: self._reduce_scatter(output, tensors, plan), [output])

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: ReduceScatterOptions) -> Work | None:
        plan = self._plan("reduce_scatter_single", output, opts.reduceOp)
        if plan is None or tensor.numel() != self.size * output.numel() or output.dtype != tensor.dtype:
            return None
        parts = flattened(tensor).view(self.size, -1).unbind()
        return self._do(opts, lambda: self._reduce_scatter(output, parts, plan), [output])

    def all_to_all_single(
        self,
        output: Tensor,
        tensor: Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: AllToAllOptions,
    ) -> Work | None:
        plan = self._plan("all_to_all_single", tensor, None)
        if (
            plan is None
            or output_splits
            or input_splits
            or output.shape != tensor.shape
            or output.dtype != tensor.dtype
        ):
            return None
        if tensor.shape[0] % self.size:
            return None
        return self._do(opts, lambda: self._all_to_all_single(output, tensor, plan), [output])

    def barrier(self, opts: BarrierOptions) -> Work | None:
        if self.way is None:
            return self._do(opts, lambda: self._guarded(_BARRIER, procedures.meet, _BARRIER), [])
        return self._do(opts, lambda: self._guarded(_BARRIER, crossing.barrier, self.way, _BARRIER), [])

    def carry(self, name: str, args: Sequence[Any], start: Callable[[], Work]) -> Work:
        """Meet first, so that ranks of a host which call different things find out, whoever then moves the data."""
        call = call_of(words_of_any(name, args))
        tensor, op = first_tensor(args), getattr(args[-1], "reduceOp", None)
        if tensor is not None and op is not None:
            recipe_for(op, tensor.dtype, self.size)  # what has no meaning is refused now, not when somebody waits

        def act() -> None:
            with recorder.operation(self.name, call.said):
                self._guarded(call, procedures.meet, call)
                recorder.during(recorder.GLOO, lambda: start().wait())

        results = args[0] if isinstance(args[0], list | tuple) else args[:1]
        return self._do(args[-1], act, [each for each in results if isinstance(each, Tensor)])

    def _do(self, opts: Any, act: Callable[[], None], tensors: Sequence[Tensor]) -> Work:
        """Now, or in line."""
        if opts.asyncOp:
            return self.queue.later(act, tensors)
        self.queue.now(act)
        return DONE

    def carry_out(self, call: Call, procedure: Callable[..., None], *args: Any) -> None:
        """A procedure of somebody else's, in its turn: `procedure(arena, *args)` on all ranks of the host at once."""
        self.queue.now(self._guarded, call, procedure, *args)

    # How it is done

    def _all_reduce(self, tensor: Tensor, plan: Plan, scale: float | None) -> None:
        flat = flattened(tensor)
        self._guarded(plan.call, self._small if plan.places else self._large_or_shared, flat, plan, scale)
        finish(tensor, flat, plan, self.size)

    def _reduce(self, tensor: Tensor, plan: Plan, keep: bool) -> None:
        flat = flattened(tensor)
        if plan.places:
            self._guarded(plan.call, procedures.small, flat, plan, None, keep)
        else:
            self._guarded(plan.call, procedures.large, flat, plan, keep)
        if keep:
            finish(tensor, flat, plan, self.size)

    def _broadcast(self, tensor: Tensor, plan: Plan, root: int) -> None:
        flat = flattened(tensor)
        if plan.places:
            self._guarded(plan.call, procedures.small_broadcast, flat, plan, root)
        else:
            self._guarded(plan.call, copying.broadcast, flat, root, plan.call)
        if self.rank != root:
            finish(tensor, flat, plan, self.size)

    def _all_gather(self, outputs: Sequence[Tensor], tensor: Tensor, plan: Plan) -> None:
        flats = [flattened(output) for output in outputs]
        self._guarded(plan.call, copying.all_gather, flats, flattened(tensor), plan.call)
        for output, flat in zip(outputs, flats, strict=True):
            finish(output, flat, plan, self.size)

    def _all_gather_single(self, output: Tensor, tensor: Tensor, plan: Plan) -> None:
        flat = flattened(output)
        self._guarded(plan.call, copying.all_gather, flat.view(self.size, -1).unbind(), flattened(tensor), plan.call)
        finish(output, flat, plan, self.size)

    def _all_to_all_single(self, output: Tensor, tensor: Tensor, plan: Plan) -> None:
        flat = flattened(output)
        rows = [each.view(self.size, -1).unbind() for each in (flat, flattened(tensor))]
        self._guarded(plan.call, copying.all_to_all, *rows, plan.call)
        finish(output, flat, plan, self.size)

    def _reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor], plan: Plan) -> None:
        flat, flats = flattened(output), [flattened(each) for each in inputs]
        self._guarded(plan.call, procedures.reduce_scatter, flat, flats, plan)
        finish(output, flat, plan, self.size)

    def _guarded(self, call: Call, procedure: Callable[..., None], *args: Any) -> None:
        """Run a procedure, unless the group has failed: then the ranks no longer agree on how far they are."""
        guard = self._guard
        if guard.failure is not None:
            guard.check(Operation(call.said, guard.begun))
        if self.way is not None:
            with guard.waiting(Operation(call.said, guard.begun)):
                self._run(call, procedure, args)
        elif recorder.active is not None:
            self._run(call, procedure, args)
        else:
            procedure(self.arena, *args)

    def _run(self, call: Call, procedure: Callable[..., None], args: Sequence[Any]) -> None:
        if recorder.active is None:
            procedure(self.arena, *args)
        else:
            with recorder.operation(self.name, call.said):
                procedure(RecordedArena(self.arena), *map(recorded, args))

    # Plans

    def _plan(self, name: str, tensor: Tensor, op: Any, more: str = "", sizes_differ: bool = False) -> Plan | None:
        """None: not ours. sizes_differ: the ranks' own tensors may, and what they agree on is in `more`."""
        # A ReduceOp's hash is its number, and so is its RedOpType's; comparing the objects themselves takes 1 us.
        key = (name, tensor.dtype, tensor.shape, -1 if op is None else hash(op), more, tensor.layout)
        try:
            return self._plans[key]
        except KeyError:
            if len(self._plans) > _MOST_PLANS:
                self._plans.clear()
            plan = self._plans[key] = self._make_plan(name, tensor, kind_of(op), more, sizes_differ)
            return plan

    def _fit(self, by_rank: Sequence[Tensor], own: Tensor) -> bool:
        """One for each rank, none of them empty, and ours like our own. What does not fit is Gloo's to refuse."""
        if len(by_rank) != self.size or by_rank[self.rank].shape != own.shape:
            return False
        return all(each.numel() and each.dtype == own.dtype for each in by_rank)

    def _make_plan(self, name: str, tensor: Tensor, kind: Any, more: str, sizes_differ: bool) -> Plan | None:
        if kind == RedOpType.PREMUL_SUM and name != "all_reduce":
            return None
        if tensor.layout != torch.strided or not tensor.numel() or not can(tensor.dtype, kind):
            return None
        if self.way is not None and name != "all_reduce":
            return None
        call = call_of(words(name, tensor.dtype, None if sizes_differ else tensor.shape, kind, more))
        small = tensor.numel() * tensor.element_size() <= SMALL and name in ("all_reduce", "reduce", "broadcast")
        places = self.arena.small_places(tensor.dtype, tensor.numel()) if small else ()
        return Plan(call, places, COMBINE.get(kind, torch.add), kind == RedOpType.AVG, kind == RedOpType.PREMUL_SUM)

    # Tensors in shared memory

    def add_block(self, parts: Sequence[memoryview], address: int) -> None:
        """Make memory known in which every rank has a tensor. All ranks call it in the same order."""
        self.num_blocks += 1
        self._blocks[address] = SharedBlock(self.num_blocks, parts)

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
        key = (block.number, offset, plan.call.mark)
        found = self._plans.get(key)
        if found is None:
            tensors = tuple(
                torch.frombuffer(part, dtype=tensor.dtype, count=tensor.numel(), offset=offset) for part in block.parts
            )
            where = zlib.crc32(f"{block.number} {offset}".encode()) % ((1 << BLOCK_BITS) - 1) + 1
            call = Call(plan.call.mark | where, plan.call.said)
            blocks = summing.own_blocks(tensors, self.arena.rank) if self.way is None else ()
            found = self._plans[key] = plan._replace(call=call, shared=tensors, blocks=blocks)
        return found


def _factor(opts: AllreduceOptions) -> float | None:
    """By what our values are multiplied; None for a factor of 1, which is no work."""
    factor = float(opts.reduceOp.factor)
    return None if factor == 1.0 else factor
