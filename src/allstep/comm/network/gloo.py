"""Every collective over one Gloo group, without Gloo's restrictions.

Gloo itself sums only eight dtypes, treats a non-contiguous tensor as contiguous and sums the wrong
elements, leaves partial sums in the tensors of ranks that are not the root of a reduce, produces
bools of value 2, refuses uneven sizes, and has transfers that cannot be polled. Here instead:

* Data that is only moved travels as bytes, so every dtype is supported. Tensors that are not
  contiguous are staged and copied back.
* Data that is reduced follows a `Recipe` (see `reduction`).
* reduce_scatter is all_to_all plus the sum in this process, in rank order: the fewest bytes on the
  wire, any dtype, any sizes.
* gather and scatter are transfers to and from the root, so only the root needs to know all sizes.
  An uneven all_gather is one broadcast per rank.

Each operation starts all its parts at once. Several parts may be under way, but none waits for
another, so `async_op` never needs a thread of ours, and ranks that wait in different orders cannot
block each other.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
    Work,
)

from allstep.comm.op.reduction import Recipe, fold, recipe_for
from allstep.comm.op.transport import Transport
from allstep.comm.op.work import Later, Transfer

# The tag of transfers inside gather and scatter; a user's send with this tag would mix with them.
PRIVATE_TAG = 2**31 - 1

_MARGIN = timedelta(seconds=120)


class GlooTransport(Transport):
    """The transport over Gloo; supports all operations.

    `gloo` is a ProcessGroupGloo, which torch's stubs declare without its collectives.
    """

    def __init__(self, gloo: Any, timeout: timedelta) -> None:
        self.gloo = gloo
        self.set_timeout(timeout)
        self.rank: int = gloo.rank()
        self.size: int = gloo.size()

    def set_timeout(self, timeout: timedelta) -> None:
        """Set Gloo's timeout to a margin above the group's.

        The guard enforces the group's timeout and names the missing ranks; Gloo's must not expire
        before.
        """
        self._longest = timeout + _MARGIN
        # Transfers ignore it: they have the timeout of connecting.
        self.gloo._set_default_timeout(self._longest)

    # Reductions

    def all_reduce(self, tensor: Tensor, opts: AllreduceOptions) -> Work:
        if tensor.layout is not torch.strided:
            return Later([self.gloo.allreduce([tensor], opts)], [tensor])
        recipe = recipe_for(opts.reduceOp, tensor.dtype, self.size)
        if recipe.is_native and _is_plain(tensor):
            return Later([self.gloo.allreduce([tensor], opts)], [tensor])
        if recipe.by_hand:
            return self._all_reduce_by_hand(tensor, recipe, opts)
        carried = recipe.prepared(tensor.detach())
        work = self.gloo.allreduce([carried], _with_kind(AllreduceOptions(), recipe, opts))
        return Later([work], [tensor], lambda: recipe.put(carried, tensor))

    def _all_reduce_by_hand(self, tensor: Tensor, recipe: Recipe, opts: AllreduceOptions) -> Work:
        own = recipe.prepared(tensor.detach())
        parts = [torch.empty_like(own) for _ in range(self.size)]
        work = self.all_gather(parts, own, _with_timeout(AllgatherOptions(), opts))
        return Later([work], [tensor], lambda: recipe.put(fold(parts, recipe.kind), tensor))

    def all_reduce_coalesced(self, tensors: Sequence[Tensor], opts: AllreduceOptions) -> Work:
        """Reduce several tensors by one sum per dtype, over all tensors of it in one buffer."""
        # Gloo rejects the options of the coalesced form here.
        plain = _with_timeout(AllreduceOptions(), opts)
        plain.reduceOp = opts.reduceOp
        works: list[Work] = []
        copies: list[tuple[Tensor, list[Tensor]]] = []
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            same = [tensor for tensor in tensors if tensor.dtype == dtype]
            flat = torch.cat([tensor.detach().reshape(-1) for tensor in same])
            works.append(self.all_reduce(flat, plain))
            copies.append((flat, same))

        def copy_back() -> None:
            for flat, same in copies:
                parts = torch.split_with_sizes(flat, [each.numel() for each in same])
                for part, tensor in zip(parts, same, strict=True):
                    tensor.detach().copy_(part.view(tensor.shape))

        return Later(works, tensors, copy_back)

    def reduce(self, tensor: Tensor, opts: ReduceOptions) -> Work:
        root = opts.rootRank
        recipe = recipe_for(opts.reduceOp, tensor.dtype, self.size)
        if recipe.by_hand:
            return self._reduce_by_hand(tensor, recipe, opts)
        carried = recipe.prepared(tensor.detach())
        if root != self.rank and carried.data_ptr() == tensor.data_ptr():
            carried = carried.clone()
        gloo_opts = _with_kind(ReduceOptions(), recipe, opts)
        gloo_opts.rootRank = root
        work = self.gloo.reduce([carried], gloo_opts)
        finish = (lambda: recipe.put(carried, tensor)) if root == self.rank else None
        return Later([work], [tensor], finish)

    def _reduce_by_hand(self, tensor: Tensor, recipe: Recipe, opts: ReduceOptions) -> Work:
        own = recipe.prepared(tensor.detach())
        gather_opts = _with_timeout(GatherOptions(), opts)
        gather_opts.rootRank = opts.rootRank
        parts = (
            [torch.empty_like(own) for _ in range(self.size)] if opts.rootRank == self.rank else []
        )
        work = self.gather(parts, own, gather_opts)
        return Later(
            [work],
            [tensor],
            (lambda: recipe.put(fold(parts, recipe.kind), tensor)) if parts else None,
        )

    def reduce_scatter(
        self, output: Tensor, tensors: Sequence[Tensor], opts: ReduceScatterOptions
    ) -> Work:
        recipe = recipe_for(opts.reduceOp, output.dtype, self.size)
        prepared = [recipe.prepared(tensor.detach()) for tensor in tensors]
        outgoing = torch.cat([part.view(-1) for part in prepared])
        return self._reduce_scattered(
            output, outgoing, [part.numel() for part in prepared], recipe, opts
        )

    def reduce_scatter_single(
        self, output: Tensor, tensor: Tensor, opts: ReduceScatterOptions
    ) -> Work:
        recipe = recipe_for(opts.reduceOp, output.dtype, self.size)
        outgoing = recipe.prepared(tensor.detach()).view(-1)
        return self._reduce_scattered(
            output, outgoing, [outgoing.numel() // self.size] * self.size, recipe, opts
        )

    def _reduce_scattered(
        self,
        output: Tensor,
        outgoing: Tensor,
        counts: list[int],
        recipe: Recipe,
        opts: ReduceScatterOptions,
    ) -> Work:
        """Send `counts[i]` elements to rank i, receive ours from each rank, and reduce them."""
        received = torch.empty(self.size, counts[self.rank], dtype=outgoing.dtype)
        nbytes = [count * outgoing.element_size() for count in counts]
        incoming = [nbytes[self.rank]] * self.size
        all_opts = _with_timeout(AllToAllOptions(), opts)
        work = self.gloo.alltoall_base(
            _bytes(received), _bytes(outgoing), incoming, nbytes, all_opts
        )
        return Later(
            [work], [output], lambda: recipe.put(fold(received.unbind(0), recipe.kind), output)
        )

    # Moves

    def broadcast(self, tensor: Tensor, opts: BroadcastOptions) -> Work:
        data, finish = _staged(tensor, fill=opts.rootRank == self.rank)
        work = self.gloo.broadcast([data], opts)
        return Later([work], [tensor], finish)

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor, opts: AllgatherOptions) -> Work:
        if len({output.numel() for output in outputs}) > 1:
            return self._all_gather_uneven(outputs, tensor, opts)
        staged = [_staged(output) for output in outputs]
        work = self.gloo.allgather([[data for data, _ in staged]], [_bytes(tensor)], opts)
        return Later([work], outputs, _all_of(finish for _, finish in staged))

    def _all_gather_uneven(
        self, outputs: Sequence[Tensor], tensor: Tensor, opts: AllgatherOptions
    ) -> Work:
        own = tensor.detach().clone()
        works = []
        for root, output in enumerate(outputs):
            root_opts = _with_timeout(BroadcastOptions(), opts)
            root_opts.rootRank = root
            works.append(self.broadcast(own if root == self.rank else output, root_opts))
        return Later(works, outputs, lambda: _copy(own, outputs[self.rank]))

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: AllgatherOptions) -> Work:
        data, finish = _staged(output)
        work = self.gloo._allgather_base(data, _bytes(tensor), opts)
        return Later([work], [output], finish)

    def gather(self, outputs: Sequence[Tensor], tensor: Tensor, opts: GatherOptions) -> Work:
        root = opts.rootRank
        if root != self.rank:
            return Later([self.send(tensor, root, PRIVATE_TAG)], [], timeout=opts.timeout)
        works = [self.recv(outputs[peer], peer, PRIVATE_TAG) for peer in self._others()]
        return Later(works, outputs, lambda: _copy(tensor, outputs[root]), opts.timeout)

    def scatter(self, output: Tensor, tensors: Sequence[Tensor], opts: ScatterOptions) -> Work:
        root = opts.rootRank
        if root != self.rank:
            return Later([self.recv(output, root, PRIVATE_TAG)], [output], timeout=opts.timeout)
        works = [self.send(tensors[peer], peer, PRIVATE_TAG) for peer in self._others()]
        return Later(works, [output], lambda: _copy(tensors[root], output), opts.timeout)

    def all_to_all(
        self, outputs: Sequence[Tensor], tensors: Sequence[Tensor], opts: AllToAllOptions
    ) -> Work:
        return self._exchange(outputs, tensors, opts)

    def all_to_all_single(
        self,
        output: Tensor,
        tensor: Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: AllToAllOptions,
    ) -> Work:
        data, finish = _staged(output, fill=False)
        incoming, outgoing = (
            self._row_bytes(output, output_splits),
            self._row_bytes(tensor, input_splits),
        )
        work = self.gloo.alltoall_base(data, _bytes(tensor), incoming, outgoing, opts)
        return Later([work], [output], finish)

    def _row_bytes(self, tensor: Tensor, splits: Sequence[int]) -> list[int]:
        """Return splits in bytes for splits in rows."""
        num_rows = tensor.shape[0]
        splits = splits or [num_rows // self.size] * self.size
        return [split * (_nbytes(tensor) // max(num_rows, 1)) for split in splits]

    def _exchange(
        self, outputs: Sequence[Tensor], tensors: Sequence[Tensor], opts: AllToAllOptions
    ) -> Work:
        """Send `tensors[i]` to rank i and receive `outputs[i]` from it."""
        outgoing = torch.cat([_bytes(tensor) for tensor in tensors])
        incoming = torch.empty(sum(map(_nbytes, outputs)), dtype=torch.uint8)
        splits = [_nbytes(output) for output in outputs]
        work = self.gloo.alltoall_base(
            incoming, outgoing, splits, [_nbytes(tensor) for tensor in tensors], opts
        )

        def unpack() -> None:
            for part, output in zip(torch.split_with_sizes(incoming, splits), outputs, strict=True):
                _from_bytes(part, output)

        return Later([work], outputs, unpack)

    def barrier(self, opts: BarrierOptions) -> Work:
        return Later([self.gloo.barrier(opts)], [])

    # Transfers

    def send(self, tensor: Tensor, peer: int, tag: int) -> Work:
        data = _bytes(tensor)
        return Transfer(self.gloo.send([data], peer, tag), tensor, self._longest)

    def recv(self, tensor: Tensor, peer: int, tag: int) -> Work:
        data, finish = _staged(tensor, fill=False)
        return Transfer(self.gloo.recv([data], peer, tag), tensor, self._longest, finish)

    def recv_any(self, tensor: Tensor, tag: int) -> Work:
        data, finish = _staged(tensor, fill=False)
        return Transfer(self.gloo.recv_anysource([data], tag), tensor, self._longest, finish)

    def _others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]


# Tensors as bytes


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _is_plain(tensor: Tensor) -> bool:
    """Return whether memory order is element order, without a pending conjugation or negation."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _bytes(tensor: Tensor) -> Tensor:
    """Return the elements as bytes: a view if they are contiguous, else a copy."""
    tensor = tensor.detach()
    if not _is_plain(tensor):
        tensor = tensor.resolve_conj().resolve_neg().contiguous()
    return _as_bytes(tensor)


def _as_bytes(plain: Tensor) -> Tensor:
    """Return a view of a contiguous tensor as bytes.

    Not `view(-1)`: a tensor of one element counts as contiguous whatever its stride, and keeps it.
    """
    return plain.detach().as_strided((plain.numel(),), (1,)).view(torch.uint8)


def _from_bytes(data: Tensor, target: Tensor) -> None:
    place, finish = _staged(target, fill=False)
    place.copy_(data)
    if finish is not None:
        finish()


def _copy(source: Tensor, target: Tensor) -> None:
    target.detach().copy_(
        source.detach().view(target.shape) if source.is_contiguous() else source.detach()
    )


def _staged(tensor: Tensor, fill: bool = True) -> tuple[Tensor, Callable[[], None] | None]:
    """Return bytes for a result, and a function that copies them into `tensor`.

    The function is None if the bytes are a view of `tensor`. `fill`: start with its values.
    """
    if _is_plain(tensor):
        return _as_bytes(tensor), None
    stage = torch.empty(tensor.shape, dtype=tensor.dtype)
    if fill:
        _copy(tensor, stage)
    return _as_bytes(stage), lambda: _copy(stage, tensor)


def _all_of(steps: Any) -> Callable[[], None] | None:
    found = [step for step in steps if step is not None]

    def run() -> None:
        for step in found:
            step()

    return run if found else None


# torch's options


def _with_timeout(new: Any, opts: Any) -> Any:
    new.timeout = opts.timeout
    new.asyncOp = opts.asyncOp
    return new


def _with_kind(new: Any, recipe: Recipe, opts: Any) -> Any:
    new.reduceOp = recipe.kind
    return _with_timeout(new, opts)
