"""The transport over memory that the ranks of a host share: which operations it supports.

For each kind of call (operation, dtype, shape, reduction) a plan is made once and kept (`plan`):
the mark by which ranks compare their calls, the views of the pools, torch's function for the
reduction. The procedures that the ranks then run together, on one host and over several, are in
`procedures`. A synchronous call runs in the caller's thread (`queue.now`), an asynchronous one is
queued.

It declines (returns None for) sparse or empty tensors, reductions that torch's kernels do not
compute, gathers to one rank and uneven splits: all cases in which the ranks could not make the same
choice from what each of them sees. Gloo runs these, after a barrier on the host has shown that all
ranks call the same operation (`carry`).
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cached_property, partial
from typing import Any

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

from allstep.comm.group import across_hosts as across_hosts
from allstep.comm.group import procedures
from allstep.comm.group.across_hosts import Crossing
from allstep.comm.group.host_map import Layout
from allstep.comm.group.plan import Plan, Plans, call_of, finish, flattened
from allstep.comm.group.traced import RecordedArena, RecordedCrossing, recorded
from allstep.comm.health.failure import Operation
from allstep.comm.health.guard import Guard
from allstep.comm.memory import copy as copying
from allstep.comm.memory.arena import Arena, Call
from allstep.comm.memory.kept import kept_memory
from allstep.comm.op.describe import describe_call, first_tensor
from allstep.comm.op.queue import Queue
from allstep.comm.op.reduction import recipe_for
from allstep.comm.op.transport import Transport
from allstep.comm.op.work import DONE
from allstep.comm.timeline import recorder

# Only its kind matters.
_SCALED = _make_nccl_premul_sum(1.0)
_BARRIER = call_of("barrier")


class SharedMemoryTransport(Transport):
    """Runs operations through shared memory, and declines those that it does not support.

    `layout` is which ranks of the group are on which host. `crossing` leads to the other hosts, if
    there are several; then only all_reduce and barrier are supported. `purpose`: that of memory
    which is used again in the next generation (`kept`); None for other memory.
    """

    def __init__(
        self,
        arena: Arena,
        layout: Layout,
        guard: Guard,
        crossing: Crossing | None = None,
        purpose: str | None = None,
    ) -> None:
        self.arena, self.purpose = arena, purpose
        self.flags = arena.flags
        self.layout = layout
        self.rank, self.size = layout.rank, layout.size
        self.crossing = crossing = (
            None if crossing is None else RecordedCrossing(crossing.num_slices, crossing.lane)
        )
        self.queue = Queue()
        self.plans = plans = Plans(arena, crossing is None)
        # Bound here, because every operation uses them.
        self._plan, self._blocks = plans.find, plans.blocks
        self._guard = guard
        self._small = (
            procedures.small if crossing is None else partial(procedures.small_across, crossing)
        )
        self._large_or_shared = (
            procedures.large_or_shared
            if crossing is None
            else partial(procedures.large_or_shared_across, crossing)
        )

    @cached_property
    def name(self) -> str:
        """The name of the group, as torch knows it."""
        groups = dist.distributed_c10d._world.pg_names.items()
        return next((name for group, name in groups if getattr(group, "local", None) is self), "?")

    def set_timeout(self, timeout: timedelta) -> None:
        if self.crossing is not None and self.crossing.lane is not None:
            self.crossing.lane.transport.set_timeout(timeout)

    def close(self) -> None:
        if not self.queue.close() and self.purpose is not None:
            # An operation that is stuck in a thread may still write into our pool.
            kept_memory().drop(self.purpose)

    # Operations of the transport

    def all_reduce(self, tensor: Tensor, opts: AllreduceOptions) -> Work | None:
        plan = self._plan("all_reduce", tensor, opts.reduceOp)
        if plan is None:
            return None
        if self._blocks and not plan.places:
            plan = self.plans.shared(tensor, plan)
        scale = _factor(opts) if plan.scaled else None
        if opts.asyncOp:
            return self.queue.later(lambda: self._all_reduce(tensor, plan, scale), [tensor])
        self.queue.now(self._all_reduce, tensor, plan, scale)
        return DONE

    def sum_scaled(self, tensor: Tensor, scale: float) -> bool:
        """Sum each rank's tensor times its own `scale`, in place; return False to decline."""
        plan = self._plan("all_reduce", tensor, _SCALED)
        if plan is None:
            return False
        if self._blocks and not plan.places:
            plan = self.plans.shared(tensor, plan)
        self.queue.now(self._all_reduce, tensor, plan, None if scale == 1.0 else scale)
        return True

    def all_reduce_coalesced(
        self, tensors: Sequence[Tensor], opts: AllreduceOptions
    ) -> Work | None:
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

    def all_gather(
        self, outputs: Sequence[Tensor], tensor: Tensor, opts: AllgatherOptions
    ) -> Work | None:
        sizes = f", {[output.numel() for output in outputs]}"
        plan = self._plan("all_gather", tensor, None, sizes, sizes_differ=True)
        if plan is None or not self._fit(outputs, tensor):
            return None
        return self._do(opts, lambda: self._all_gather(outputs, tensor, plan), outputs)

    def all_gather_single(
        self, output: Tensor, tensor: Tensor, opts: AllgatherOptions
    ) -> Work | None:
        plan = self._plan("all_gather_single", tensor, None)
        if (
            plan is None
            or output.numel() != self.size * tensor.numel()
            or output.dtype != tensor.dtype
        ):
            return None
        return self._do(opts, lambda: self._all_gather_single(output, tensor, plan), [output])

    def reduce_scatter(
        self, output: Tensor, tensors: Sequence[Tensor], opts: ReduceScatterOptions
    ) -> Work | None:
        sizes = f", {[tensor.numel() for tensor in tensors]}"
        plan = self._plan("reduce_scatter", output, opts.reduceOp, sizes, sizes_differ=True)
        if plan is None or not self._fit(tensors, output):
            return None
        return self._do(opts, lambda: self._reduce_scatter(output, tensors, plan), [output])

    def reduce_scatter_single(
        self, output: Tensor, tensor: Tensor, opts: ReduceScatterOptions
    ) -> Work | None:
        plan = self._plan("reduce_scatter_single", output, opts.reduceOp)
        if (
            plan is None
            or tensor.numel() != self.size * output.numel()
            or output.dtype != tensor.dtype
        ):
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
        if self.crossing is None:
            return self._do(opts, lambda: self._guarded(_BARRIER, procedures.barrier, _BARRIER), [])
        return self._do(
            opts, lambda: self._guarded(_BARRIER, across_hosts.barrier, self.crossing, _BARRIER), []
        )

    def carry(self, name: str, args: Sequence[Any], start: Callable[[], Work]) -> Work:
        """Run a declined collective through `start`, after a barrier on the host.

        The barrier detects ranks of a host that call different operations, whichever transport
        follows.
        """
        call = call_of(describe_call(name, args))
        tensor, op = first_tensor(args), getattr(args[-1], "reduceOp", None)
        if tensor is not None and op is not None:
            # Raise now if the reduction is not defined for the dtype, not at the wait.
            recipe_for(op, tensor.dtype, self.size)

        def act() -> None:
            with recorder.operation(self.name, call.text):
                self._guarded(call, procedures.barrier, call)
                recorder.during(recorder.GLOO, lambda: start().wait())

        results = args[0] if isinstance(args[0], list | tuple) else args[:1]
        return self._do(args[-1], act, [each for each in results if isinstance(each, Tensor)])

    def _do(self, opts: Any, act: Callable[[], None], tensors: Sequence[Tensor]) -> Work:
        """Run an operation now, or queue it if the call is asynchronous."""
        if opts.asyncOp:
            return self.queue.later(act, tensors)
        self.queue.now(act)
        return DONE

    def carry_out(self, call: Call, procedure: Callable[..., None], *args: Any) -> None:
        """Run `procedure(arena, *args)` after the queued operations, on all ranks of the host.

        For procedures of other packages.
        """
        self.queue.now(self._guarded, call, procedure, *args)

    # Running the procedures

    def _all_reduce(self, tensor: Tensor, plan: Plan, scale: float | None) -> None:
        flat = flattened(tensor)
        self._guarded(
            plan.call, self._small if plan.places else self._large_or_shared, flat, plan, scale
        )
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
        self._guarded(
            plan.call,
            copying.all_gather,
            flat.view(self.size, -1).unbind(),
            flattened(tensor),
            plan.call,
        )
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
        """Run a procedure; raise if the group has failed, since its ranks are then out of step."""
        guard = self._guard
        if guard.failure is not None:
            guard.check(Operation(call.text, guard.begun))
        if self.crossing is not None:
            with guard.waiting(Operation(call.text, guard.begun)):
                self._run(call, procedure, args)
        elif recorder.active is not None:
            self._run(call, procedure, args)
        else:
            procedure(self.arena, *args)

    def _run(self, call: Call, procedure: Callable[..., None], args: Sequence[Any]) -> None:
        if recorder.active is None:
            procedure(self.arena, *args)
        else:
            with recorder.operation(self.name, call.text):
                procedure(RecordedArena(self.arena), *map(recorded, args))

    def _fit(self, by_rank: Sequence[Tensor], own: Tensor) -> bool:
        """Return whether there is one tensor per rank, none empty, and ours has our own shape.

        Others are declined, so that Gloo reports the error.
        """
        if len(by_rank) != self.size or by_rank[self.rank].shape != own.shape:
            return False
        return all(each.numel() and each.dtype == own.dtype for each in by_rank)


def _factor(opts: AllreduceOptions) -> float | None:
    """Return the factor of our values; None for 1, which needs no multiplication."""
    factor = float(opts.reduceOp.factor)
    return None if factor == 1.0 else factor
