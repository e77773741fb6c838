"""One rank of `allstep bench comm`: does what the bench says over a socket, and sleeps there in
between.

    python -m allstep.bench.comm.rank torch|mpi SOCKET

`torch` ranks are started by `allstep run` and measure allstep and Gloo, in the same processes and
on the same tensor; `mpi` ranks are started by mpirun. Both speak the same lines of JSON with the
bench::

    rank  -> {"rank": 0, "size": 2, "names": ["allstep, private", "Gloo", ...]}
    bench -> {"prepare": nbytes}                         memory for this size; the last size's is given back
    rank  -> {"absent": {"allstep, shared": "why"}}      whom this size does not suit
    bench -> {"measure": "Gloo", "calls": 100, "caches": "hot"}
    rank  -> {"seconds": [...]}                          of each call; or {"error": "..."} when a sum is wrong

A rank that waits for a line uses no core, so whoever's turn it is has the machine to itself.

Every sum is checked. The tensor holds 1, 2, ... 61, 1, 2, ... plus the rank; summed in place n
times over p ranks it becomes (p * that + 0 + 1 + ... + p - 1) * p ** (n - 1), and a block that
lands in the wrong place does not fit the pattern. Before that power leaves float32 the tensor is
filled anew, between two timings.
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

_PATTERN = 61  # a prime: no block of the pipeline is a multiple of it
_BITS = 80  # the sums may grow by so many powers of two before the tensor is filled anew


class SumContender(Protocol):
    """Somebody who can sum a tensor over the ranks, in place."""

    @abstractmethod
    def empty(self, numel: int) -> Tensor:
        """Memory of the kind that this contender is measured with."""

    @abstractmethod
    def call(self, tensor: Tensor) -> Callable[[], Any]:
        """The call to be timed, with nothing around it."""

    @abstractmethod
    def meet(self) -> None:
        """A barrier."""


class Torch(SumContender):
    """A process group of torch: allstep's or Gloo's.

    `empty` may be one for both, so that they work on the same memory.
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
    """Answers the lines of the bench."""

    def __init__(self, rank: int, size: int, contenders: Mapping[str, SumContender]) -> None:
        self.rank, self.size = rank, size
        self.contenders = contenders
        self.names = list(contenders)
        self._tensors: dict[str, Tensor] = {}
        self._ballast: Tensor | None = None

    def answer(self, order: dict[str, Any]) -> dict[str, Any]:
        if "prepare" in order:
            return {"absent": self._prepare(order["prepare"] // 4)}
        measure = {HOT: self._measure, WRITTEN: self._measure_written, COLD: self._measure_cold}
        try:
            return {"seconds": measure[order.get("caches", HOT)](order["measure"], order["calls"])}
        except ArithmeticError as error:
            return {"error": f"{order['measure']}, rank {self.rank}: {error}"}

    def _prepare(self, numel: int) -> dict[str, str]:
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
        """Fill the tensor, do `then`, and time calls one after the other."""
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
            contender.meet()  # nobody reads a shared tensor while another already fills his
            check(tensor, self.size, turns)
        return seconds

    def _measure_written(self, name: str, calls: int) -> list[float]:
        """Each call on values that the rank has just written, as a backward pass does."""
        return [self._measure(name, 1)[0] for _ in range(calls)]

    def _measure_cold(self, name: str, calls: int) -> list[float]:
        """Each call on values that have left the caches since they were written."""
        return [self._measure(name, 1, self._evict)[0] for _ in range(calls)]

    def _evict(self) -> None:
        """Read more than the largest cache holds. Reading leaves lines that need no write-back."""
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
    """1, 2, ... 61, 1, 2, ... plus the rank."""
    pattern = _pattern() + rank
    whole, rest = _rows(tensor)
    whole.copy_(pattern)
    rest.copy_(pattern[: rest.numel()])


def check(tensor: Tensor, size: int, turns: int) -> None:
    """Raises ArithmeticError unless the tensor is what `turns` sums over `size` ranks make of
    `fill`."""
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
    """The tensor as rows as long as the pattern, and what is left."""
    end = tensor.numel() // _PATTERN * _PATTERN
    return tensor[:end].view(-1, _PATTERN), tensor[end:]


def torch_rank() -> CommRank:
    """Joins the ranks that were started with this one, and makes a group for each contender."""
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
        contenders[f"allstep, {name}"] = Torch(
            dist.new_group(backend="allstep", pg_options=options)
        )
    return CommRank(world.rank, world.size, contenders)


def mpi_rank() -> CommRank:
    from mpi4py import MPI

    torch.set_num_threads(1)
    return CommRank(MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size(), {OPEN_MPI: Mpi(MPI)})


class Answering(Protocol):
    """What the bench talks to: `CommRank`, or another object that answers its lines."""

    rank: int
    size: int
    names: list[str]

    @abstractmethod
    def answer(self, order: dict[str, Any]) -> dict[str, Any]: ...


def serve(path: str, rank: Answering) -> None:
    """Until the bench closes the socket."""
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(path)
        with link.makefile("rw") as lines:
            _say(lines, {"rank": rank.rank, "size": rank.size, "names": rank.names})
            for line in lines:
                _say(lines, rank.answer(json.loads(line)))


def _say(lines: Any, word: dict[str, Any]) -> None:
    lines.write(f"{json.dumps(word)}\n")
    lines.flush()


if __name__ == "__main__":
    kind, path = sys.argv[1:]
    serve(path, {"torch": torch_rank, "mpi": mpi_rank}[kind]())
