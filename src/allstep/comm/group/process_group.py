"""The process group of backend "allstep": torch's calls on one side, our movers on the other.

torch lets a Python class stand in for a whole process group. What it asks of such a class was found
by experiment, and each line below answers one of the findings:

* Each collective exists under an old and a new name, and which one torch calls depends on its
  version and on the caller. Both are here.
* C++ (DDP, functional collectives, torch.compile) finds our methods by name; those it does not look
  for it takes from the Backend that is registered inside: a Gloo group for the CPU, an NCCL group
  for CUDA when there is one.
* `super().allreduce()` would call our own method again. So the inner backends are called directly.
* Without a name of its own the group is unusable for FSDP2, DTensor and torch.compile.

The way of one call: `dist.all_reduce(t)` -> `allreduce([t], opts)` here -> CUDA? then NCCL ->
`local.all_reduce` (memory shared on this host; it may decline) -> `far.all_reduce` (Gloo). See
`mover` for the contract. Arguments are checked here (`checks`), so a mover may trust them. torch
passes tensors and options in several shapes; `torch_arguments` brings them into one and has the
signatures of the methods that take `*given`. Where time matters, the usual shape is tested for here
and costs nothing extra.
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
from torch.distributed import ProcessGroup

from allstep.comm.group import torch_arguments as arguments
from allstep.comm.health.at_exit import leave_alone
from allstep.comm.health.guard import Guard
from allstep.comm.join.barrier import wait_for_all
from allstep.comm.network.guarded_gloo import guarded
from allstep.comm.op import checks
from allstep.comm.op.transport import Transport
from allstep.comm.op.work import Later
from allstep.errors import CommError

NAME = "allstep"


class AllstepGroup(ProcessGroup):
    """A torch process group.

    Made by `backend.create`; `local` is set by whoever builds the shared memory of the host.
    """

    def __init__(
        self, store: Store, rank: int, size: int, timeout: timedelta, far: Transport, guard: Guard
    ) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # the one constructor that works for a subclass
        self.local: Transport | None = None
        self.far: Transport | None = far  # None when the group has been shut down
        self.guard = guard
        self._rank, self._size = rank, size  # rank() and size() go through C++
        self.nccl: Any = None  # takes CUDA tensors, when there is one
        self._store = store
        self._timeout = timeout
        self._name = self._desc = ""
        self._coalesced: list[Work] | None = None

    # Collectives

    def allreduce(  # type: ignore[override]
        self,
        tensors: Sequence[Tensor],
        opts: Any = arguments.ALL_REDUCE,
        timeout: timedelta | None = None,
        **named: Any,
    ) -> Work:
        # The hot path: written out, because a call more is 0.1 us.
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
        """Sum over the ranks, of each rank's tensor times its own scale, in place: float32 or
        float64. Waits for it.

        All ranks call it together. In shared memory the scale is an argument of the sum; elsewhere
        it is torch's PREMUL_SUM.
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
        checks.fits("all_gather", tensor, outputs[0][self._rank], self._rank)
        return self._move("all_gather", outputs[0], tensor, opts)

    def allgather_coalesced(
        self,
        outputs: Sequence[Sequence[Tensor]],
        inputs: Sequence[Tensor],
        opts: AllgatherOptions = arguments.ALL_GATHER,
    ) -> Work:
        """outputs[rank][i] comes from inputs[i] of that rank."""
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
        checks.holds_all("all_gather_into_tensor", output, input, self._rank, self._size)
        return self._move("all_gather_single", output, input, opts)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        opts: AllgatherOptions = arguments.ALL_GATHER,
    ) -> Work:
        works = [
            self.all_gather_single(output, each, opts)
            for output, each in zip(outputs, inputs, strict=True)
        ]
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
            checks.fits("gather", tensor, places[self._rank], self._rank)
        return self._move("gather", places, tensor, opts)

    def scatter(self, *given: Any, **named: Any) -> Work:
        outputs, inputs, opts = arguments.scatter(*given, **named)
        (output,) = outputs
        if output.is_cuda:
            return self._nccl("scatter", outputs, inputs, opts)
        tensors = inputs[0] if inputs else []
        if opts.rootRank == self._rank:
            self._one_each("scatter", tensors)
            checks.fits("scatter", tensors[self._rank], output, self._rank)
        return self._move("scatter", output, tensors, opts)

    def reduce_scatter(self, *given: Any, **named: Any) -> Work:
        outputs, inputs, opts = arguments.reduce_scatter(*given, **named)
        (output,) = outputs
        if output.is_cuda:
            return self._nccl("reduce_scatter", outputs, inputs, opts)
        self._one_each("reduce_scatter", inputs[0])
        checks.fits("reduce_scatter", inputs[0][self._rank], output, self._rank)
        return self._move("reduce_scatter", output, inputs[0], opts)

    def reduce_scatter_single(  # type: ignore[override]
        self, output: Tensor, input: Tensor, opts: ReduceScatterOptions = arguments.REDUCE_SCATTER
    ) -> Work:
        if input.is_cuda:
            return self._nccl("_reduce_scatter_base", output, input, opts)
        checks.holds_all("reduce_scatter_tensor", input, output, self._rank, self._size)
        return self._move("reduce_scatter_single", output, input, opts)

    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]

    def reduce_scatter_single_coalesced(  # type: ignore[override]
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        opts: ReduceScatterOptions = arguments.REDUCE_SCATTER,
    ) -> Work:
        works = [
            self.reduce_scatter_single(output, each, opts)
            for output, each in zip(outputs, inputs, strict=True)
        ]
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
        if input.is_cuda:
            return self._nccl(
                "alltoall_base", output, input, output_split_sizes, input_split_sizes, opts
            )
        checks.rows("all_to_all_single", output, output_split_sizes, self._rank, self._size)
        checks.rows("all_to_all_single", input, input_split_sizes, self._rank, self._size)
        return self._move(
            "all_to_all_single", output, input, output_split_sizes, input_split_sizes, opts
        )

    alltoall_base = all_to_all_single  # type: ignore[assignment]

    def barrier(self, opts: Any = arguments.BARRIER, **named: Any) -> Work:  # type: ignore[override]
        if type(opts) is not BarrierOptions or named:
            opts = arguments.barrier(opts, **named)
        if self.nccl is not None and opts.device is not None and opts.device.type == "cuda":
            return self._nccl("barrier", opts)
        return self._move("barrier", opts)

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Names the ranks that do not come: all of them, whatever `wait_all_ranks` says."""
        wait_for_all(
            self._store, self.rank(), self.size(), (timeout or self._timeout).total_seconds()
        )

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

    # Who does it

    def _one_each(self, name: str, tensors: Sequence[Tensor]) -> None:
        checks.one_for_each_rank(name, tensors, self._rank, self._size)

    def _move(self, name: str, *args: Any) -> Work:
        """The seam: shared memory first, then Gloo."""
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
        """Between two ranks: nobody else has to agree."""
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

    # Name, store, end. The names in camel case are those that C++ looks for.

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._desc

    def getBackendName(self) -> str:  # noqa: N802
        return NAME

    name = _get_backend_name = getBackendName
    setGroupName, setGroupDesc = _set_group_name, _set_group_desc  # noqa: N815

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self._name

    @property
    def group_desc(self) -> str:
        return self._desc

    def get_group_store(self) -> Store:
        return self._store

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
        # A Gloo thread that has just finished an operation needs the interpreter to free its
        # tensors. If the last reference to the group
        # goes with a C++ object (DDP's reducer), Gloo is torn down with the interpreter held and
        # waits for that thread for ever.
        leave_alone(())
        for backend in self._inner():
            backend.shutdown()
        # A caller that still has the group gets an error; the memory that the host's ranks shared
        # is released all the same.
        if self.local is not None:
            self.local.close()
        self.local = self.far = None

    def _inner(self) -> list[Any]:
        return [self._get_backend(device) for device in self._device_types]

    def split_group(self, *_: Any, **__: Any) -> ProcessGroup:
        raise CommError(
            "split_group is NCCL's alone: use torch.distributed.new_group", op="split_group"
        )

    def merge_remote_group(self, *_: Any, **__: Any) -> ProcessGroup:
        raise CommError(
            "merge_remote_group is not supported: form a new group of all the ranks",
            op="merge_remote_group",
        )
