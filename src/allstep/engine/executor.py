"""Runs the operations that the coordinator answers: their arithmetic, on one group of backend
"allstep" per process set.

    result = postscale * reduce(prescale * tensor)
    Average is Sum with postscale divided by the number of ranks

Scaling follows Horovod: integers are multiplied in float64 and truncated towards zero, half
precision is multiplied in float32 and rounded once, and a factor of 1 costs no pass over the data.
Several reductions or broadcasts of one answer are packed into one buffer, and unpacked afterwards.

Tensors are read and written through `.data`: as with Horovod, autograd neither records the access
nor counts it as a change.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BroadcastOptions,
    PrefixStore,
    ReduceScatterOptions,
    Store,
)

from allstep.comm.group import backend
from allstep.comm.group.build_memory import Options
from allstep.comm.group.process_group import AllstepGroup
from allstep.comm.health.failure import Failure
from allstep.engine.adasum import combine
from allstep.engine.hooks import Hooks
from allstep.engine.mismatch import rows_of
from allstep.engine.request import Kind, Op, Request, RequestSpec, numbers

_REDUCTIONS = {
    Op.AVERAGE: dist.ReduceOp.SUM,
    Op.SUM: dist.ReduceOp.SUM,
    Op.MIN: dist.ReduceOp.MIN,
    Op.MAX: dist.ReduceOp.MAX,
    Op.PRODUCT: dist.ReduceOp.PRODUCT,
}
_HALVES = (torch.float16, torch.bfloat16)


def _waited(options: Any, **values: Any) -> Any:
    """Return the options for a collective that has finished when the call returns."""
    options.asyncOp = False
    for name, value in values.items():
        setattr(options, name, value)
    return options


_ALL_REDUCE = {op: _waited(AllreduceOptions(), reduceOp=kind) for op, kind in _REDUCTIONS.items()}
_REDUCE_SCATTER = _waited(ReduceScatterOptions(), reduceOp=dist.ReduceOp.SUM)
_ALL_GATHER = _waited(AllgatherOptions())
_ALL_TO_ALL = _waited(AllToAllOptions())


class Executor:
    """The process groups of the sets that this rank belongs to, and the operations on them.

    `store`: the store through which the groups are formed. `start`: seconds for connecting.
    `timeout`: seconds for one operation. `options_of`: returns the options of a group of all ranks,
    for its purpose. `device_of_zeros`: the GPU on which a rank that has joined
    allocates zeros when the tensors of the other ranks are on a GPU; -1 for the default GPU.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        start: float,
        timeout: float,
        options_of: Callable[[str], Options | None] = lambda purpose: None,
    ) -> None:
        self._store = store
        self._options_of = options_of
        self._rank = rank
        self._start, self._timeout = start, timeout
        self._groups: dict[int, AllstepGroup] = {}
        self._extra_groups: dict[tuple[str, int], AllstepGroup] = {}
        self._ranks: dict[int, tuple[int, ...]] = {}
        self._num_made = 0
        # The store prefix of each set. Set numbers are used again, prefixes are not.
        self._prefixes: dict[int, str] = {}
        self.device_of_zeros = -1

    # Groups

    def add_set(self, number: int, ranks: tuple[int, ...]) -> None:
        """Add a process set; its members connect to each other.

        All ranks call it in the same order.
        """
        self._num_made += 1
        self._ranks[number] = ranks
        self._prefixes[number] = f"set/{self._num_made}"
        if self._rank in ranks:
            self._groups[number] = self._make("engine", number)

    def _make(self, purpose: str, number: int) -> AllstepGroup:
        name, ranks = f"allstep {purpose}, set {number}", self._ranks[number]
        store = PrefixStore(f"{self._prefixes[number]}/{purpose}", self._store)
        # Set 0 has all ranks.
        options = self._options_of(f"{purpose} of the engine") if number == 0 else None
        return backend.create_apart(
            store, name, self._rank, ranks, self._start, self._timeout, options
        )

    def has_group(self, purpose: str, number: int) -> bool:
        """Return whether `group` has formed the group of this purpose."""
        return (purpose, number) in self._extra_groups

    def group(self, purpose: str, number: int) -> AllstepGroup:
        """Return another group of a set's members, for use without waiting for the engine.

        All members call it together for the first use.
        """
        key = (purpose, number)
        if key not in self._extra_groups:
            self._extra_groups[key] = self._make(purpose, number)
        return self._extra_groups[key]

    def remove_set(self, number: int) -> None:
        """Close the groups of a process set."""
        del self._ranks[number]
        removed = [self._groups.pop(number, None)]
        removed += [
            self._extra_groups.pop(key) for key in list(self._extra_groups) if key[1] == number
        ]
        for group in removed:
            if group is not None:
                group.shutdown()

    def close(self) -> None:
        """Close all groups."""
        for number in list(self._ranks):
            self.remove_set(number)

    def abort(self, reason: str, peer: int | None) -> None:
        """Abort our groups, so that other ranks stop waiting for this one.

        `peer`: the lost rank that caused it, if any.
        """
        for group in self.groups:
            group.guard.fail(
                Failure("CommError" if peer is None else "PeerLost", reason, peer, self._rank)
            )

    @property
    def groups(self) -> list[AllstepGroup]:
        """All groups of this rank."""
        return [*self._groups.values(), *self._extra_groups.values()]

    # Operations

    def run(
        self,
        specs: Sequence[RequestSpec],
        more: Sequence[bytes],
        requests: Sequence[Request | None],
        hooks: Hooks,
    ) -> list[Any]:
        """Run one answer of the coordinator and return the results, one per operation.

        `more`: further data of each operation (see `mismatch.Verdict`). A request is None if this
        rank has joined: it contributes zeros.
        """
        first = specs[0]
        group = self._groups[first.process_set]
        wanted = [
            request or _zeros(spec, self.device_of_zeros)
            for spec, request in zip(specs, requests, strict=True)
        ]
        with torch.no_grad():
            if len(specs) > 1 and first.kind is Kind.ALLREDUCE:
                results = _fused_all_reduce(group, wanted, partial(hooks.activity, specs))
            elif len(specs) > 1 and first.kind is Kind.BROADCAST:
                activity = partial(hooks.activity, specs)
                results = _fused_broadcast(group, wanted, first.root, activity)
            else:
                hooks.activity(specs, first.kind.name)
                results = [
                    _OPERATIONS[first.kind](group, request, spec, each)
                    for request, spec, each in zip(wanted, specs, more, strict=True)
                ]
        if first.device == "cuda":
            torch.cuda.current_stream().synchronize()
        return results


def _zeros(spec: RequestSpec, number: int) -> Request:
    """Return the request of a rank that has joined: it contributes zeros."""
    device = (
        "cpu" if spec.device == "cpu" else f"{spec.device}:{number}" if number >= 0 else spec.device
    )
    tensor = torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype), device=device)
    return Request(spec.kind, spec.name, tensor, tensor, spec.op, spec.prescale, spec.postscale)


def _given(request: Request) -> Tensor:
    assert request.tensor is not None
    return request.tensor.data


def _target(request: Request) -> Tensor:
    """Return the tensor for the result."""
    if request.output is not None:
        return request.output.data
    return torch.empty_like(_given(request), memory_format=torch.contiguous_format)


def scale(tensor: Tensor, factor: float) -> Tensor:
    """Multiply a tensor by a factor in its own dtype, in place; return it."""
    if factor == 1.0:
        return tensor
    if tensor.dtype in _HALVES:
        return tensor.copy_(tensor.float().mul_(factor))
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.mul_(factor)
    return tensor.copy_(tensor.double().mul_(factor))


def _factor_after(request: Request, size: int) -> float:
    return request.postscale / size if request.op is Op.AVERAGE else request.postscale


def _all_reduce(group: AllstepGroup, request: Request, spec: RequestSpec, more: bytes) -> Tensor:
    given, target = _given(request), _target(request)
    work = (
        target
        if target.is_contiguous()
        else torch.empty_like(given, memory_format=torch.contiguous_format)
    )
    if work.data_ptr() != given.data_ptr():
        work.copy_(given)
    _reduce(group, work, request)
    if work is not target:
        target.copy_(work)
    return request.output if request.output is not None else target


def _fused_all_reduce(
    group: AllstepGroup, requests: Sequence[Request], activity: Callable[[str], None]
) -> list[Tensor]:
    """Reduce tensors of one dtype, device, reduction and scale factors in one buffer."""
    activity("MEMCPY_IN_FUSION_BUFFER")
    flat = torch.cat([_given(request).reshape(-1) for request in requests])
    activity(Kind.ALLREDUCE.name)
    _reduce(group, flat, requests[0])
    activity("MEMCPY_OUT_FUSION_BUFFER")
    return _unpacked(flat, requests)


def _fused_broadcast(
    group: AllstepGroup,
    requests: Sequence[Request],
    root: int,
    activity: Callable[[str], None],
) -> list[Tensor]:
    """Send tensors of one dtype and device in one buffer. `root`: a rank of the world."""
    place = group.guard.names.index(root)
    given = [_given(request) for request in requests]
    activity("MEMCPY_IN_FUSION_BUFFER")
    if group._rank == place:
        flat = torch.cat([each.reshape(-1) for each in given])
    else:
        flat = given[0].new_empty(sum(each.numel() for each in given))
    activity(Kind.BROADCAST.name)
    if flat.numel():
        group.broadcast([flat], _waited(BroadcastOptions(), rootRank=place)).wait()
    activity("MEMCPY_OUT_FUSION_BUFFER")
    return _unpacked(flat, requests)


def _unpacked(flat: Tensor, requests: Sequence[Request]) -> list[Tensor]:
    """Copy the parts of a buffer to the places of the results; return the results."""
    results, at = [], 0
    for request in requests:
        target = _target(request)
        target.copy_(flat[at : at + target.numel()].view(target.shape))
        at += target.numel()
        results.append(request.output if request.output is not None else target)
    return results


def _reduce(group: AllstepGroup, tensor: Tensor, request: Request) -> None:
    scale(tensor, request.prescale)
    if tensor.numel():
        group.allreduce([tensor], _ALL_REDUCE[request.op]).wait()
    scale(tensor, _factor_after(request, group._size))


def _all_gather(group: AllstepGroup, request: Request, spec: RequestSpec, more: bytes) -> Tensor:
    """Gather rows of all ranks. `more`: the number of rows of each rank.

    Equal numbers of rows take one collective; ranks without rows do not send.
    """
    rows = numbers(more.decode())
    given = _given(request).contiguous()
    output = torch.empty((sum(rows), *given.shape[1:]), dtype=given.dtype, device=given.device)
    if not output.numel():
        return output
    if min(rows) == max(rows):
        group.all_gather_single(output, given, _ALL_GATHER).wait()
    elif min(rows):
        group.allgather([list(torch.split(output, list(rows)))], [given], _ALL_GATHER).wait()
    else:
        for root, part in enumerate(torch.split(output, list(rows))):
            if rows[root]:
                if root == group._rank:
                    part.copy_(given)
                group.broadcast([part], _waited(BroadcastOptions(), rootRank=root)).wait()
    return output


def _broadcast(group: AllstepGroup, request: Request, spec: RequestSpec, more: bytes) -> Tensor:
    # `spec.root` is a rank of the world.
    root = group.guard.names.index(spec.root)
    given, target = _given(request), _target(request)
    if group._rank == root and target.data_ptr() != given.data_ptr():
        target.copy_(given)
    work = target.contiguous()
    if work.numel():
        group.broadcast([work], _waited(BroadcastOptions(), rootRank=root)).wait()
    if work is not target:
        target.copy_(work)
    return request.output if request.output is not None else target


def _all_to_all(
    group: AllstepGroup, request: Request, spec: RequestSpec, more: bytes
) -> tuple[Tensor, Tensor]:
    # [i][j]: rows that rank i sends to rank j.
    splits = rows_of(more)
    outgoing, incoming = list(splits[group._rank]), [each[group._rank] for each in splits]
    given = _given(request)[: sum(outgoing)].contiguous()
    output = torch.empty((sum(incoming), *given.shape[1:]), dtype=given.dtype, device=given.device)
    if any(map(any, splits)) and all(given.shape[1:]):
        even = len({count for each in splits for count in each}) == 1
        sizes = ([], []) if even else (incoming, outgoing)
        group.all_to_all_single(output, given, *sizes, _ALL_TO_ALL).wait()
    return output, torch.tensor(incoming, dtype=torch.int32)


def _reduce_scatter(
    group: AllstepGroup, request: Request, spec: RequestSpec, more: bytes
) -> Tensor:
    """Reduce and distribute the rows in order; the first ranks may get one more row."""
    size, rank = group._size, group._rank
    given = _given(request)
    num_rows = given.shape[0]
    rows = [num_rows // size + (each < num_rows % size) for each in range(size)]
    work = scale(given.clone(memory_format=torch.contiguous_format), request.prescale)
    output = torch.empty((rows[rank], *given.shape[1:]), dtype=given.dtype, device=given.device)
    if not work.numel():
        return output
    parts = list(torch.split(work, rows))
    if min(rows):
        group.reduce_scatter([output], [parts], _REDUCE_SCATTER).wait()
    else:
        group.allreduce([work], _ALL_REDUCE[Op.SUM]).wait()
        output.copy_(parts[rank])
    return scale(output, _factor_after(request, size))


def _adasum(group: AllstepGroup, request: Request, spec: RequestSpec, more: bytes) -> Tensor:
    given, target = _given(request), _target(request)
    work = scale(given.clone(memory_format=torch.contiguous_format), request.prescale)
    if work.numel():
        work = combine(group, work)
    target.copy_(scale(work, request.postscale))
    return request.output if request.output is not None else target


def _barrier(group: AllstepGroup, request: Request, spec: RequestSpec, more: bytes) -> None:
    """Return at once: the coordinator answers only after all ranks have requested the barrier."""


_OPERATIONS: dict[Kind, Callable[[AllstepGroup, Request, RequestSpec, bytes], Any]] = {
    Kind.ALLREDUCE: _all_reduce,
    Kind.ALLGATHER: _all_gather,
    Kind.BROADCAST: _broadcast,
    Kind.ALLTOALL: _all_to_all,
    Kind.REDUCESCATTER: _reduce_scatter,
    Kind.ADASUM: _adasum,
    Kind.BARRIER: _barrier,
}
