"""One rank of `allstep bench comm`: executes requests of the bench, which arrive over a socket.

    python -m allstep.bench.comm.rank torch|mpi SOCKET

`torch` ranks are started by `allstep run` and measure allstep and Gloo, in the same processes and
on the same tensor; `mpi` ranks are started by mpirun. Both exchange lines of JSON with the bench::

    rank  -> {"rank": 0, "size": 2, "names": ["allstep, private", "Gloo", ...]}
    bench -> {"prepare": nbytes}                        allocate memory, free that of the last size
    rank  -> {"absent": {"allstep, shared": "why"}}     contenders that do not support this size
    bench -> {"measure": "Gloo", "calls": 100, "caches": "hot"}
    rank  -> {"seconds": [...]}                         of each call; {"error": "..."} if wrong

A rank that waits for a line uses no CPU time, so the contender that is timed runs alone.

Every sum is checked. The tensor holds 1, 2, ... 61, 1, 2, ... plus the rank; summed in place n
times over p ranks it becomes (p * that + 0 + 1 + ... + p - 1) * p ** (n - 1), and a block at a
wrong position does not match the pattern. Before that power exceeds float32 the tensor is filled
again, between two timings.
"""

import json
import math
import socket
import sys
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from allstep import machine
from allstep.bench.comm.result import COLD, GLOO, HOT, OPEN_MPI, PRIVATE, SHARED, WRITTEN

# A prime: no block of the pipeline is a multiple of it.
_PATTERN = 61
# The sums may grow by this many powers of two before the tensor is filled again.
_BITS = 80


class SumContender(Protocol):
    """An implementation that can sum a tensor over the ranks, in place."""

    @abstractmethod
    def empty(self, numel: int) -> Tensor:
        """Return memory of the kind that this contender is measured with."""

    @abstractmethod
    def call(self, tensor: Tensor) -> Callable[[], Any]:
        """Return the call to time, without anything around it."""

    @abstractmethod
    def meet(self) -> None:
        """Wait at a barrier."""


class Torch(SumContender):
    """A process group of torch: allstep's or Gloo's.

    Both may use the same `empty`, so that they work on the same memory.
    """

    def __init__(self, group: Any, empty: Callable[[int], Tensor] = torch.empty) -> None:
        self._group = group
        self._empty = empty

    def empty(self, numel: int) -> Tensor:
        return self._empty(numel)

    def call(self, tensor: Tensor) -> Callable[[], Any]:
        group = self._group
        return lambda: dist.all_reduce(tensor, group=group)

    def meet(self) -> None:
        dist.barrier(self._group)


class Mpi(SumContender):
    """MPI through mpi4py, on the same kind of memory as the others."""

    def __init__(self, mpi: Any) -> None:
        self._mpi = mpi

    def empty(self, numel: int) -> Tensor:
        return torch.empty(numel)

    def call(self, tensor: Tensor) -> Callable[[], Any]:
        all_reduce, in_place = self._mpi.COMM_WORLD.Allreduce, self._mpi.IN_PLACE
        buffer = [tensor.numpy(), self._mpi.FLOAT]
        return lambda: all_reduce(in_place, buffer)

    def meet(self) -> None:
        self._mpi.COMM_WORLD.Barrier()


class CommRank:
    """Executes the requests of the bench on one rank."""

    def __init__(self, rank: int, size: int, contenders: Mapping[str, SumContender]) -> None:
        self.rank, self.size = rank, size
        self.contenders = contenders
        self.names = list(contenders)
        self._tensors: dict[str, Tensor] = {}
        self._ballast: Tensor | None = None

    def answer(self, order: dict[str, Any]) -> dict[str, Any]:
        """Execute a request and return the answer."""
        if "prepare" in order:
            return {"absent": self._prepare(order["prepare"] // 4)}
        measure = {HOT: self._measure, WRITTEN: self._measure_written, COLD: self._measure_cold}
        try:
            return {"seconds": measure[order.get("caches", HOT)](order["measure"], order["calls"])}
        except ArithmeticError as error:
            return {"error": f"{order['measure']}, rank {self.rank}: {error}"}

    def _prepare(self, numel: int) -> dict[str, str]:
        """Allocate tensors; return the reason for each contender that does not support the size."""
        self._tensors.clear()
        private = torch.empty(numel)
        absent = {}
        for name, contender in self.contenders.items():
            try:
                self._tensors[name] = contender.empty(numel) if name == SHARED else private
            except RuntimeError as error:
                absent[name] = str(error)
        return absent

    def _measure(
        self, name: str, calls: int, then: Callable[[], None] = lambda: None
    ) -> list[float]:
        """Fill the tensor, call `then`, and return the seconds of consecutive calls."""
        contender, tensor = self.contenders[name], self._tensors[name]
        call = contender.call(tensor)
        at_once = max(1, int(_BITS / math.log2(max(2, self.size))))
        seconds: list[float] = []
        while len(seconds) < calls:
            turns = min(at_once, calls - len(seconds))
            fill(tensor, self.rank)
            then()
            contender.meet()
            seconds += _time(call, turns)
            # No rank fills its tensor while another one still reads it.
            contender.meet()
            check(tensor, self.size, turns)
        return seconds

    def _measure_written(self, name: str, calls: int) -> list[float]:
        """Time calls on values that the rank has just written, as after a backward pass."""
        return [self._measure(name, 1)[0] for _ in range(calls)]

    def _measure_cold(self, name: str, calls: int) -> list[float]:
        """Time calls on values that are no longer in the caches."""
        return [self._measure(name, 1, self._evict)[0] for _ in range(calls)]

    def _evict(self) -> None:
        """Read more than the largest cache holds.

        Reading leaves cache lines that need no write-back.
        """
        if self._ballast is None:
            self._ballast = torch.ones(2 * machine.largest_cache() // 4)
        self._ballast.sum()


def _time(call: Callable[[], Any], turns: int) -> list[float]:
    clock = time.perf_counter
    marks = [clock()]
    for _ in range(turns):
        call()
        marks.append(clock())
    return [after - before for before, after in pairwise(marks)]


def fill(tensor: Tensor, rank: int) -> None:
    """Write 1, 2, ... 61, 1, 2, ... plus the rank into the tensor."""
    pattern = _pattern() + rank
    whole, rest = _rows(tensor)
    whole.copy_(pattern)
    rest.copy_(pattern[: rest.numel()])


def check(tensor: Tensor, size: int, turns: int) -> None:
    """Raise ArithmeticError unless the tensor is the result of `turns` sums over `size` ranks."""
    expected = (_pattern() * size + size * (size - 1) // 2) * float(size) ** (turns - 1)
    whole, rest = _rows(tensor)
    for start in range(0, len(whole), 4096):
        _check_rows(whole[start : start + 4096], expected)
    _check_rows(rest.view(1, -1), expected)


def _check_rows(rows: Tensor, expected: Tensor) -> None:
    if not torch.allclose(rows, expected[: rows.shape[1]].expand_as(rows), rtol=1e-5, atol=0):
        raise ArithmeticError("wrong sum")


def _pattern() -> Tensor:
    return torch.arange(1, _PATTERN + 1, dtype=torch.float32)


def _rows(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tensor as rows of the pattern's length, and the remaining elements."""
    end = tensor.numel() // _PATTERN * _PATTERN
    return tensor[:end].view(-1, _PATTERN), tensor[end:]


def torch_rank() -> CommRank:
    """Join the other ranks, and make a process group for each contender."""
    import allstep.comm
    from allstep.comm.network.algorithms import ALGORITHMS

    world = allstep.comm.init()
    torch.set_num_threads(1)
    ours, gloo = dist.new_group(backend="allstep"), dist.new_group(backend="gloo")
    contenders = {
        SHARED: Torch(ours, lambda numel: allstep.comm.shared_empty(numel, group=ours)),
        PRIVATE: Torch(ours),
        GLOO: Torch(gloo),
    }
    for name in ALGORITHMS:
        options = allstep.comm.Options(algorithm=name)
        group = dist.new_group(backend="allstep", pg_options=options)
        contenders[f"allstep, {name}"] = Torch(group)
    return CommRank(world.rank, world.size, contenders)


def mpi_rank() -> CommRank:
    """Return the rank in a process that mpirun started."""
    from mpi4py import MPI

    torch.set_num_threads(1)
    return CommRank(MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size(), {OPEN_MPI: Mpi(MPI)})


class Answering(Protocol):
    """The interface that `serve` needs: `CommRank`, or another object that answers requests."""

    rank: int
    size: int
    names: list[str]

    @abstractmethod
    def answer(self, order: dict[str, Any]) -> dict[str, Any]: ...


def serve(path: str, rank: Answering) -> None:
    """Answer requests until the bench closes the socket."""
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(path)
        with link.makefile("rw") as lines:
            _send(lines, {"rank": rank.rank, "size": rank.size, "names": rank.names})
            for line in lines:
                _send(lines, rank.answer(json.loads(line)))


def _send(lines: Any, message: dict[str, Any]) -> None:
    lines.write(f"{json.dumps(message)}\n")
    lines.flush()


if __name__ == "__main__":
    kind, path = sys.argv[1:]
    serve(path, {"torch": torch_rank, "mpi": mpi_rank}[kind]())
