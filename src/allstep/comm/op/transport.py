"""The interface between torch's process group and the transports that move the data.

`AllstepGroup` (torch's names, torch's argument shapes) asks its transports in order: first `local`,
the memory that the ranks of one host share, then `far`, which is Gloo. A transport runs an
operation and returns its Work, or returns None to decline it. The base class declines everything,
so a transport implements the operations that it supports and inherits the rest. All ranks must make
the same choice: they decide by what they have in common (operation, shape, dtype), never by the
state of one rank.

`opts` are torch's own option objects: `timeout`, `asyncOp`, and where they apply `reduceOp` and
`rootRank` (a rank of this group). They are passed on unread, because each access costs 0.1 to 0.3
us. If `asyncOp` is false, the caller waits at once, so the transport may do all the work before it
returns (`work.DONE`). If it is true (also for calls from C++: DDP, functional collectives), the
caller may ask the Work for the tensors (`work.Done(tensors)`).

Tensors are on the CPU. They may be non-contiguous, empty, zero-dimensional, sparse (all_reduce
only) and may require gradients.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

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


class Transport:
    """The base of all transports: declines every operation."""

    def carry(self, name: str, args: Sequence[Any], start: Callable[[], Work]) -> Work:
        """Run a collective that this transport declined, by calling `start` of the next transport.

        A transport may first check that all ranks call the same collective.
        """
        return start()

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time that a collective may take from now on."""

    def close(self) -> None:
        """End the threads of this transport, if any: the group is shut down."""

    def all_reduce(self, tensor: Tensor, opts: AllreduceOptions) -> Work | None:
        """Reduce `tensor` over all ranks, in place."""
        return None

    def sum_scaled(self, tensor: Tensor, scale: float) -> bool:
        """Sum each rank's tensor times its own `scale`, in place; return False to decline."""
        return False

    def all_reduce_coalesced(
        self, tensors: Sequence[Tensor], opts: AllreduceOptions
    ) -> Work | None:
        """Reduce several tensors in one call, in place; their dtypes may differ."""
        return None

    def broadcast(self, tensor: Tensor, opts: BroadcastOptions) -> Work | None:
        """Copy the tensor of `opts.rootRank` to all ranks."""
        return None

    def reduce(self, tensor: Tensor, opts: ReduceOptions) -> Work | None:
        """Reduce `tensor` to `opts.rootRank`; the tensors of the other ranks keep their values."""
        return None

    def all_gather(
        self, outputs: Sequence[Tensor], tensor: Tensor, opts: AllgatherOptions
    ) -> Work | None:
        """Gather each rank's tensor into `outputs`, one per rank; their sizes may differ."""
        return None

    def all_gather_single(
        self, output: Tensor, tensor: Tensor, opts: AllgatherOptions
    ) -> Work | None:
        """Gather all tensors into one output; `tensor` may be a part of `output` (as in FSDP2)."""
        return None

    def gather(self, outputs: Sequence[Tensor], tensor: Tensor, opts: GatherOptions) -> Work | None:
        """Gather tensors of any size on the root; `outputs` is empty on the other ranks."""
        return None

    def scatter(
        self, output: Tensor, tensors: Sequence[Tensor], opts: ScatterOptions
    ) -> Work | None:
        """Send one of the root's tensors to each rank; `tensors` is empty on the other ranks."""
        return None

    def reduce_scatter(
        self, output: Tensor, tensors: Sequence[Tensor], opts: ReduceScatterOptions
    ) -> Work | None:
        """Reduce `tensors`, one for each rank; ours goes to `output`. Their sizes may differ."""
        return None

    def reduce_scatter_single(
        self, output: Tensor, tensor: Tensor, opts: ReduceScatterOptions
    ) -> Work | None:
        """Reduce `tensor` and keep our slice in `output`, which may be a part of `tensor`."""
        return None

    def all_to_all(
        self, outputs: Sequence[Tensor], tensors: Sequence[Tensor], opts: AllToAllOptions
    ) -> Work | None:
        """Send `tensors[i]` to rank i and receive `outputs[i]` from it."""
        return None

    def all_to_all_single(
        self,
        output: Tensor,
        tensor: Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: AllToAllOptions,
    ) -> Work | None:
        """Exchange rows between all ranks.

        Splits count rows (dimension 0); empty splits mean equal ones.
        """
        return None

    def barrier(self, opts: BarrierOptions) -> Work | None:
        """Wait until all ranks have called this."""
        return None

    def send(self, tensor: Tensor, peer: int, tag: int) -> Work | None:
        """Start to send `tensor` to `peer`. Must not block."""
        return None

    def recv(self, tensor: Tensor, peer: int, tag: int) -> Work | None:
        """Start to receive `tensor` from `peer`. Must not block."""
        return None

    def recv_any(self, tensor: Tensor, tag: int) -> Work | None:
        """Start to receive from the rank that sends first. Must not block.

        The Work returns that rank as `source_rank()`.
        """
        return None
