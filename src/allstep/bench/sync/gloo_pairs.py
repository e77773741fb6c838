"""Gloo pairs, a contender of `allstep bench sync`: a group of two for each worker and the server.

    python -m allstep.bench.sync.gloo_pairs pairs WORKERS SOCKET

The server has a thread for each worker, which waits in Gloo without Python's lock. A worker sends a
header and its gradient and receives the weights. The server sends its weights without a copy, so a
pull may mix parts of two updates, as MXNet's may; this is in Gloo's favor.
"""

import sys
import threading
from datetime import timedelta
from os import environ
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import FileStore, PrefixStore, ProcessGroupGloo

from allstep.bench.sync.foreign_stores import LR, lead, serve, starting
from allstep.process.python import run_module

GLOO_PAIRS = "Gloo pairs"
_TIMEOUT = timedelta(seconds=600)
# The first number of a header; the second one is the number of elements that follow.
_NEW, _PUSH, _PULL = range(3)
_WORKER, _SERVER = range(2)


class Pair:
    """One end of the link between a worker and the server."""

    def __init__(self, path: str, worker: int, member: int) -> None:
        store = PrefixStore(f"pair {worker}", FileStore(f"{path}.pairs", -1))
        # torch's stubs have neither send nor recv.
        self._group: Any = ProcessGroupGloo(store, member, 2, _TIMEOUT)
        self._peer = 1 - member

    def send(self, tensor: Tensor) -> None:
        """Send a tensor to the other end."""
        self._group.send([tensor], self._peer, 0).wait()

    def receive(self, tensor: Tensor) -> Tensor:
        """Fill the tensor with what the other end sends."""
        self._group.recv([tensor], self._peer, 0).wait()
        return tensor


class PairStore:
    """The store as a worker sees it."""

    def __init__(self, pair: Pair) -> None:
        self.server: int | None = int(environ["BENCH_SERVER"])
        self._pair = pair

    def prepare(self, nbytes: int) -> None:
        """Make a key of zeros."""
        numel = nbytes // 4
        self._gradient, self._out = torch.ones(numel), torch.empty(numel)
        self._push, self._pull = torch.tensor([_PUSH, numel]), torch.tensor([_PULL, 0])
        self._pair.send(torch.tensor([_NEW, numel]))
        self._pair.receive(self._out)

    def compute(self) -> None:
        """Write a gradient."""
        self._gradient.fill_(1)

    def call(self) -> None:
        """Push and pull."""
        self._pair.send(self._push)
        self._pair.send(self._gradient)
        self._pair.receive(self._out)

    def weights(self) -> tuple[float, float]:
        """Pull."""
        self._pair.send(self._pull)
        self._pair.receive(self._out)
        return float(self._out.min()), float(self._out.max())


class _Server:
    """The weights, and what a link does with them."""

    def __init__(self) -> None:
        self._weights = torch.zeros(0)
        self._lock = threading.Lock()

    def run(self, pair: Pair) -> None:
        """Serve one worker until this process is killed."""
        header, gradient = torch.zeros(2, dtype=torch.int64), torch.empty(0)
        while True:
            what, numel = pair.receive(header).tolist()
            if what == _NEW:
                gradient = torch.empty(numel)
                with self._lock:
                    if self._weights.numel() != numel:
                        self._weights = torch.zeros(numel)
            elif what == _PUSH:
                pair.receive(gradient)
                with self._lock:
                    self._weights.add_(gradient, alpha=-LR)
            pair.send(self._weights)


def _serve_all(path: str, count: int) -> None:
    server = _Server()
    pairs = [Pair(path, worker, _SERVER) for worker in range(count)]
    for pair in pairs:
        threading.Thread(target=server.run, args=[pair], daemon=True).start()
    threading.Event().wait()


def main(kind: str, *rest: str) -> int:
    """Be the process that the arguments name."""
    path = rest[-1]
    torch.set_num_threads(1)
    if rest[0].isdecimal():
        environ["BENCH_WORKERS"] = rest[0]
        with starting(run_module(__spec__.name, kind), path) as start:
            return lead(start, kind, int(rest[0]))
    if rest[0] == "server":
        _serve_all(path, int(environ["BENCH_WORKERS"]))
    else:
        rank = int(rest[1])
        serve(path, rank, {GLOO_PAIRS: PairStore(Pair(path, rank, _WORKER))})
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
