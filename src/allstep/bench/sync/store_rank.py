"""allstep's own store in `allstep bench sync`: `allstep run` starts the workers.

python -m allstep.bench.sync.store_rank SOCKET
"""

import sys

import torch

from allstep import kvstore
from allstep.bench.sync.foreign_stores import LR, serve

STORE, STORE_TWO = "allstep pushpull", "allstep push+pull"


class KVStoreCalls:
    """Keys of a `dist_async` store, from `first_key` + 1 on.

    The worker applies its own pushes, so there is no server.
    """

    def __init__(self, store: kvstore.KVStore, first_key: int) -> None:
        self.server: int | None = None
        self.store, self.key = store, first_key

    def prepare(self, nbytes: int) -> None:
        """Make a key of zeros."""
        self.key += 1
        numel = nbytes // 4
        self.gradient, self.out = torch.ones(numel), torch.empty(numel)
        self.store.init(self.key, torch.zeros(numel))

    def compute(self) -> None:
        """Write a gradient."""
        self.gradient.fill_(1)

    def call(self) -> None:
        """Push and pull."""
        self.store.pushpull(self.key, self.gradient, out=self.out)

    def weights(self) -> tuple[float, float]:
        """Pull."""
        self.store.pull(self.key, out=self.out)
        return float(self.out.min()), float(self.out.max())


class KVStoreTwoCalls(KVStoreCalls):
    """The same with a call for each direction."""

    def call(self) -> None:
        """Push, then pull."""
        self.store.push(self.key, self.gradient)
        self.store.pull(self.key, out=self.out)


def main(path: str) -> None:
    """Answer the bench."""
    torch.set_num_threads(1)
    store = kvstore.create("dist_async")
    store.set_optimizer(torch.optim.SGD, lr=LR)
    calls = {STORE: KVStoreCalls(store, 0), STORE_TWO: KVStoreTwoCalls(store, 1000)}
    serve(path, store.rank, calls)


if __name__ == "__main__":
    main(*sys.argv[1:])
