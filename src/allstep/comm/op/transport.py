"""The seam between torch's process group and whatever moves the data.

`AllstepGroup` (torch's names, torch's argument shapes) asks its movers in turn: first `local`, the
memory that ranks of one host share, then `far`, Gloo. A mover does an operation and returns its
Work, or returns None: "not mine". This class does nothing at all, so a mover implements what it is
good at and inherits the rest. What all ranks answer must agree: they must decide by what they have
in common (operation, shape, dtype), never by a rank's own state.

`opts` are torch's own option objects: `timeout`, `asyncOp`, and where it makes sense `reduceOp` and
`rootRank` (a rank of this group). They are handed on unread, because each look into them costs 0.1
to 0.3 us. `asyncOp` false means that the caller waits at once, so the mover may do all the work
before it returns (`work.DONE`). When it is true (also when C++ calls: DDP, functional collectives)
the caller may ask the Work for the tensors (`work.Done(tensors)`).

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
    """Moves nothing: every operation is somebody else's."""

    def carry(self, name: str, args: Sequence[Any], start: Callable[[], Work]) -> Work:
        """A collective that this mover declined:

        `start` has the next mover begin it. Here one may look whether all ranks call it.
        """
        return start()

    def set_timeout(self, timeout: timedelta) -> None:
        """From now on a collective may take so long."""

    def close(self) -> None:
        """The group is shut down: end threads, if any."""

    def all_reduce(self, tensor: Tensor, opts: AllreduceOptions) -> Work | None:
        return None

    def sum_scaled(self, tensor: Tensor, scale: float) -> bool:
        """The sum of each rank's tensor times its own scale, in place; whether it was done."""
        return False

    def all_reduce_coalesced(
        self, tensors: Sequence[Tensor], opts: AllreduceOptions
    ) -> Work | None:
        """Several tensors at once, dtypes mixed as they come."""
        return None

    def broadcast(self, tensor: Tensor, opts: BroadcastOptions) -> Work | None:
        return None

    def reduce(self, tensor: Tensor, opts: ReduceOptions) -> Work | None:
        """The tensors of the other ranks keep their values."""
        return None

    def all_gather(
        self, outputs: Sequence[Tensor], tensor: Tensor, opts: AllgatherOptions
    ) -> Work | None:
        """One output per rank; their sizes may differ."""
        return None

    def all_gather_single(
        self, output: Tensor, tensor: Tensor, opts: AllgatherOptions
    ) -> Work | None:
        """`tensor` may be a part of `output` (FSDP2 does that)."""
        return None

    def gather(self, outputs: Sequence[Tensor], tensor: Tensor, opts: GatherOptions) -> Work | None:
        """`outputs` is empty on all ranks but the root; sizes may differ."""
        return None

    def scatter(
        self, output: Tensor, tensors: Sequence[Tensor], opts: ScatterOptions
    ) -> Work | None:
        """`tensors` is empty on all ranks but the root; sizes may differ."""
        return None

    def reduce_scatter(
        self, output: Tensor, tensors: Sequence[Tensor], opts: ReduceScatterOptions
    ) -> Work | None:
        """One tensor for each rank; their sizes may differ."""
        return None

    def reduce_scatter_single(
        self, output: Tensor, tensor: Tensor, opts: ReduceScatterOptions
    ) -> Work | None:
        """`output` may be a part of `tensor`."""
        return None

    def all_to_all(
        self, outputs: Sequence[Tensor], tensors: Sequence[Tensor], opts: AllToAllOptions
    ) -> Work | None:
        return None

    def all_to_all_single(
        self,
        output: Tensor,
        tensor: Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: AllToAllOptions,
    ) -> Work | None:
        """Splits count rows (the first dimension); none at all means equal ones."""
        return None

    def barrier(self, opts: BarrierOptions) -> Work | None:
        return None

    def send(self, tensor: Tensor, peer: int, tag: int) -> Work | None:
        """Must not block."""
        return None

    def recv(self, tensor: Tensor, peer: int, tag: int) -> Work | None:
        """Must not block."""
        return None

    def recv_any(self, tensor: Tensor, tag: int) -> Work | None:
        """From whichever rank sends first; the Work knows which (`source_rank`). Must not block."""
        return None
