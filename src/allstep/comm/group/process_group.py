"""The process group of backend "allstep": from torch's calls to the transports.

torch accepts a Python class as a whole process group. Its requirements were found by experiment:

* Each collective exists under an old and a new name, and which one torch calls depends on its
  version and on the caller. Both are here.
* C++ (DDP, functional collectives, torch.compile) finds our methods by name. Those that it does not
  look for it takes from the Backend that is registered inside: a Gloo group for the CPU, an NCCL
  group for CUDA if there is one.
* `super().allreduce()` would call our own method again. So the inner backends are called directly.

The path of one call: `dist.all_reduce(t)` -> `allreduce([t], opts)` here -> for a CUDA tensor NCCL,
else `local.all_reduce` (memory shared on this host; it may decline) -> `far.all_reduce` (Gloo). See
`comm.op.transport` for the contract. Arguments are checked here (`checks`), so a transport may rely
on them. torch passes tensors and options in several shapes; `torch_arguments` converts them into
one and has the signatures of the methods that take `*given`. Where time matters, the usual shape is
tested for here and costs nothing extra.
"""

from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    ReduceScatterOptions,
    Store,
    Work,
    _make_nccl_premul_sum,
)

from allstep.comm.group import torch_arguments as arguments
from allstep.comm.group.named_group import NamedGroup
from allstep.comm.health.at_exit import leave_alone
from allstep.comm.health.guard import Guard
from allstep.comm.join.barrier import wait_for_all
from allstep.comm.network.gloo_on_demand import GlooOnDemand
from allstep.comm.network.guarded_gloo import guarded
from allstep.comm.op import argument_checks
from allstep.comm.op.transport import Transport
from allstep.comm.op.work import Later
from allstep.errors import CommError


class AllstepGroup(NamedGroup):
    """The torch process group of backend "allstep", created by `backend.create`.

    `far` is the transport for everything (Gloo). `local`, the transport over the host's shared
    memory, may be None. Both are set after construction.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta, guard: Guard):
        super().__init__(store, rank, size)
        self.local: Transport | None = None
        # None after the group has been shut down.
        self.far: Transport | GlooOnDemand | None = None
        self.guard = guard
        # rank() and size() go through C++, which takes longer.
        self._rank, self._size = rank, size
        # For CUDA tensors, if torch has NCCL and sees a GPU.
        self.nccl: Any = None
        self._timeout = timeout
        self._coalesced: list[Work] | None = None

    # Collectives

    def allreduce(  # type: ignore[override]
        self,
        tensors: Sequence[Tensor],
        opts: Any = arguments.ALL_REDUCE,
        timeout: timedelta | None = None,
        **named: Any,
    ) -> Work:
        # The hot path: written out, because one more call costs 0.1 us.
        if type(tensors) is not list or type(opts) is not AllreduceOptions or named:
            tensors, opts = arguments.allreduce(tensors, opts, timeout, **named)
        (tensor,) = tensors
        if tensor.is_cuda:
            return self._nccl("allreduce", tensors, opts)
        self.guard.begun += 1
        if self.local is not None:
            work = self.local.all_reduce(tensor, opts)
            if work is not None:
                return work if self._coalesced is None else self._noted(work)
        return self._noted(self._carried("all_reduce", (tensor, opts)))

    def sum_scaled(self, tensor: Tensor, scale: float) -> None:
        """Sum each rank's tensor times its own `scale`, in place, and wait for it.

        All ranks call it together, with float32 or float64. In shared memory the scale is an
        argument of the sum; elsewhere this is torch's PREMUL_SUM.
        """
        if self.local is not None and not tensor.is_cuda:
            self.guard.begun += 1
            if self.local.sum_scaled(tensor, scale):
                return
            self.guard.begun -= 1
        opts = AllreduceOptions()
        opts.reduceOp = _make_nccl_premul_sum(scale)
        opts.asyncOp = False
        self.allreduce([tensor], opts).wait()

    def allreduce_coalesced(
        self, tensors: Sequence[Tensor], opts: Any = arguments.COALESCED
    ) -> Work:
        if tensors[0].is_cuda:
            return self._nccl("allreduce_coalesced", tensors, opts)
        return self._move("all_reduce_coalesced", tensors, opts)

    def broadcast(  # type: ignore[override]
        self,
        tensors: Sequence[Tensor],
        opts: Any = arguments.BROADCAST,
        timeout: timedelta | None = None,
        **named: Any,
    ) -> Work:
        if type(tensors) is not list or type(opts) is not BroadcastOptions or named:
            tensors, opts = arguments.broadcast(tensors, opts, timeout, **named)
        (tensor,) = tensors
        if tensor.is_cuda:
            return self._nccl("broadcast", tensors, opts)
        return self._move("broadcast", tensor, opts)

    def reduce(self, *given: Any, **named: Any) -> Work:
        tensors, opts = arguments.reduce(*given, **named)
        (tensor,) = tensors
        if tensor.is_cuda:
            return self._nccl("reduce", tensors, opts)
        return self._move("reduce", tensor, opts)

    def allgather(self, *given: Any, **named: Any) -> Work:
        outputs, inputs, opts = arguments.allgather(*given, **named)
        (tensor,) = inputs
        if tensor.is_cuda:
            return self._nccl("allgather", outputs, inputs, opts)
        self._one_each("all_gather", outputs[0])
        argument_checks.fits("all_gather", tensor, outputs[0][self._rank], self._rank)
        return self._move("all_gather", outputs[0], tensor, opts)

    def allgather_coalesced(
        self,
        outputs: Sequence[Sequence[Tensor]],
        inputs: Sequence[Tensor],
        opts: AllgatherOptions = arguments.ALL_GATHER,
    ) -> Work:
        """Gather several tensors: outputs[rank][i] receives inputs[i] of that rank."""
        per_input = zip(*outputs, strict=True)
        works = [
            self.allgather([list(mine)], [tensor], opts)
            for mine, tensor in zip(per_input, inputs, strict=True)
        ]
        return Later(works, [tensor for rank in outputs for tensor in rank])

    def all_gather_single(
        self, output: Tensor, input: Tensor, opts: AllgatherOptions = arguments.ALL_GATHER
    ) -> Work:
        if input.is_cuda:
            return self._nccl("_allgather_base", output, input, opts)
        argument_checks.holds_all("all_gather_into_tensor", output, input, self._rank, self._size)
        return self._move("all_gather_single", output, input, opts)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        opts: AllgatherOptions = arguments.ALL_GATHER,
    ) -> Work:
        pairs = zip(outputs, inputs, strict=True)
        works = [self.all_gather_single(output, each, opts) for output, each in pairs]
        return works[0] if len(works) == 1 else Later(works, outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]

    def gather(self, *given: Any, **named: Any) -> Work:
        outputs, inputs, opts = arguments.gather(*given, **named)
        (tensor,) = inputs
        if tensor.is_cuda:
            return self._nccl("gather", outputs, inputs, opts)
        places = outputs[0] if outputs else []
        if opts.rootRank == self._rank:
            self._one_each("gather", places)
            argument_checks.fits("gather", tensor, places[self._rank], self._rank)
        return self._move("gather", places, tensor, opts)

    def scatter(self, *given: Any, **named: Any) -> Work:
        outputs, inputs, opts = arguments.scatter(*given, **named)
        (output,) = outputs
        if output.is_cuda:
            return self._nccl("scatter", outputs, inputs, opts)
        tensors = inputs[0] if inputs else []
        if opts.rootRank == self._rank:
            self._one_each("scatter", tensors)
            argument_checks.fits("scatter", tensors[self._rank], output, self._rank)
        return self._move("scatter", output, tensors, opts)

    def reduce_scatter(self, *given: Any, **named: Any) -> Work:
        outputs, inputs, opts = arguments.reduce_scatter(*given, **named)
        (output,) = outputs
        if output.is_cuda:
            return self._nccl("reduce_scatter", outputs, inputs, opts)
        self._one_each("reduce_scatter", inputs[0])
        argument_checks.fits("reduce_scatter", inputs[0][self._rank], output, self._rank)
        return self._move("reduce_scatter", output, inputs[0], opts)

    def reduce_scatter_single(  # type: ignore[override]
        self, output: Tensor, input: Tensor, opts: ReduceScatterOptions = arguments.REDUCE_SCATTER
    ) -> Work:
        if input.is_cuda:
            return self._nccl("_reduce_scatter_base", output, input, opts)
        argument_checks.holds_all("reduce_scatter_tensor", input, output, self._rank, self._size)
        return self._move("reduce_scatter_single", output, input, opts)

    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]

    def reduce_scatter_single_coalesced(  # type: ignore[override]
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        opts: ReduceScatterOptions = arguments.REDUCE_SCATTER,
    ) -> Work:
        pairs = zip(outputs, inputs, strict=True)
        works = [self.reduce_scatter_single(output, each, opts) for output, each in pairs]
        return works[0] if len(works) == 1 else Later(works, outputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]

    def alltoall(  # type: ignore[override]
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        opts: Any = arguments.ALL_TO_ALL,
        **named: Any,
    ) -> Work:
        if type(opts) is not AllToAllOptions or named:
            opts = arguments.all_to_all(opts, **named)
        if inputs[0].is_cuda:
            return self._nccl("alltoall", outputs, inputs, opts)
        self._one_each("all_to_all", outputs)
        self._one_each("all_to_all", inputs)
        return self._move("all_to_all", outputs, inputs, opts)

    def all_to_all_single(  # type: ignore[override]
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any = arguments.ALL_TO_ALL,
        **named: Any,
    ) -> Work:
        if type(opts) is not AllToAllOptions or named:
            opts = arguments.all_to_all(opts, **named)
        splits = output_split_sizes, input_split_sizes
        if input.is_cuda:
            return self._nccl("alltoall_base", output, input, *splits, opts)
        argument_checks.rows(
            "all_to_all_single", output, output_split_sizes, self._rank, self._size
        )
        argument_checks.rows("all_to_all_single", input, input_split_sizes, self._rank, self._size)
        return self._move("all_to_all_single", output, input, *splits, opts)

    alltoall_base = all_to_all_single  # type: ignore[assignment]

    def barrier(  # type: ignore[override]
        self, opts: Any = arguments.BARRIER, **named: Any
    ) -> Work:
        if type(opts) is not BarrierOptions or named:
            opts = arguments.barrier(opts, **named)
        if self.nccl is not None and opts.device is not None and opts.device.type == "cuda":
            return self._nccl("barrier", opts)
        return self._move("barrier", opts)

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Wait for all ranks, or raise with all missing ranks, whatever `wait_all_ranks` is."""
        seconds = (timeout or self._timeout).total_seconds()
        wait_for_all(self._store, self._rank, self._size, seconds)

    # Transfers

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int = 0) -> Work:
        (tensor,) = tensors
        if tensor.is_cuda:
            return self._nccl("send", tensors, peer, tag)
        return self._transfer("send", tensor, peer, tag)

    def recv(self, tensors: Sequence[Tensor], peer: int, tag: int = 0) -> Work:
        (tensor,) = tensors
        if tensor.is_cuda:
            return self._nccl("recv", tensors, peer, tag)
        return self._transfer("recv", tensor, peer, tag)

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int = 0) -> Work:
        (tensor,) = tensors
        if tensor.is_cuda:
            return self._nccl("recv_anysource", tensors, tag)
        return self._transfer("recv_any", tensor, tag)

    # Dispatch to the transports

    def _one_each(self, name: str, tensors: Sequence[Tensor]) -> None:
        argument_checks.one_for_each_rank(name, tensors, self._rank, self._size)

    def _move(self, name: str, *args: Any) -> Work:
        """Start a collective: in shared memory if possible, else over Gloo."""
        self.guard.begun += 1
        if self.local is not None:
            work: Work | None = getattr(self.local, name)(*args)
            if work is not None:
                return self._noted(work)
        return self._noted(self._carried(name, args))

    def _carried(self, name: str, args: Sequence[Any]) -> Work:
        start = partial(guarded, self.guard, self._by_far(name), name, *args)
        return start() if self.local is None else self.local.carry(name, args, start)

    def _transfer(self, name: str, *args: Any) -> Work:
        """Start a transfer between two ranks, which needs no agreement of the others."""
        return self._noted(guarded(self.guard, self._by_far(name), name, *args))

    def _by_far(self, name: str) -> Any:
        if self.far is None:
            raise CommError(f"{name} on a group that has been shut down", rank=self._rank, op=name)
        return getattr(self.far, name)

    def _nccl(self, name: str, *args: Any) -> Work:
        if self.nccl is None:
            raise CommError(
                f"{name} of a CUDA tensor, but this group has no NCCL: torch was built without it"
                " or saw no GPU at start",
                rank=self.rank(),
                op=name,
            )
        work: Work = getattr(self.nccl, name)(*args)
        return work

    # Coalescing: between start and end each operation begins at once as usual; the end returns one
    # Work for all of them.

    def _noted(self, work: Work | None) -> Work:
        assert work is not None
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _start_coalescing(self, device: torch.device) -> None:
        if device.type == "cuda":
            self._nccl("_start_coalescing")
        else:
            self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> Work:
        if device.type == "cuda":
            return self._nccl("_end_coalescing")
        works, self._coalesced = self._coalesced or [], None
        return Later(works, [])

    # Timeout and end

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout
        self.guard.timeout = timeout.total_seconds()
        for transport in (self.local, self.far):
            if transport is not None:
                transport.set_timeout(timeout)
        if self.nccl is not None:
            self.nccl._set_default_timeout(timeout)

    def abort(self) -> None:
        for backend in self._inner():
            backend.abort()

    def shutdown(self) -> None:
        self.guard.close(self)
        # A Gloo thread that has just finished an operation needs the interpreter lock to free its
        # tensors. If a C++ object (DDP's reducer) drops the last reference to the group, Gloo is
        # destroyed with that lock held and waits for its thread forever.
        if inner := self._inner():
            leave_alone(())
        for backend in inner:
            backend.shutdown()
        # A caller that still has the group gets an error, and keeps no memory of it.
        for transport in (self.local, self.far):
            if transport is not None:
                transport.close()
        self.local = self.far = None

    def _inner(self) -> list[Any]:
        return [self._get_backend(device) for device in self._device_types]
