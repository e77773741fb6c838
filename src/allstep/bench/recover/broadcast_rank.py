"""A rank of `allstep bench recover --part join`: broadcasts a model with momentum on request.

    python -m allstep.bench.recover.broadcast_rank MODEL SOCKET

| contender | what is timed |
|---|---|
| one copy | rank 0 copies the bytes once in its own memory, while the others wait |
| hvd functions | `broadcast_parameters` and `broadcast_optimizer_state` |
| a request for each tensor | `broadcast_async_` of each tensor, then `synchronize` of each |
| dist.broadcast of each tensor | on the default group, without the engine |

Requests and answers are lines of JSON as in `allstep bench comm`; a call is timed after a barrier.
"""

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import allstep.torch as hvd
from allstep import comm
from allstep.bench.comm.rank import serve
from allstep.bench.recover.join_result import COPY, FUNCTIONS, SINGLE, TORCH
from allstep.bench.recover.model_task import fill_momentum, model_task


class BroadcastRank:
    """Executes the requests of the bench on one rank."""

    def __init__(self, name: str) -> None:
        world = comm.init()
        hvd.init()
        torch.set_num_threads(1)
        self.rank, self.size = world.rank, world.size
        self._model, self._sgd, *_ = model_task(name)
        self._tensors = fill_momentum(self._model, self._sgd)
        self._nbytes = sum(tensor.nbytes for tensor in self._tensors)
        self._from, self._to = (torch.ones(self._nbytes, dtype=torch.uint8) for _ in range(2))
        self._acts: dict[str, Callable[[], object]] = {
            COPY: lambda: self._to.copy_(self._from) if self.rank == 0 else None,
            FUNCTIONS: self._functions,
            SINGLE: lambda: _one_by_one(self._tensors),
            TORCH: self._on_default_group,
        }
        self.names = list(self._acts)

    def answer(self, order: dict[str, Any]) -> dict[str, Any]:
        """Run the contender that is requested; return its seconds and the bytes of the state."""
        act = self._acts[order["measure"]]
        hvd.barrier()
        began = time.perf_counter()
        act()
        return {"seconds": time.perf_counter() - began, "nbytes": self._nbytes}

    def _functions(self) -> None:
        hvd.broadcast_parameters(self._model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(self._sgd, root_rank=0)

    def _on_default_group(self) -> None:
        for tensor in self._tensors:
            dist.broadcast(tensor.view(-1).view(torch.uint8), 0)


def _one_by_one(tensors: list[Tensor]) -> None:
    handles = [
        hvd.broadcast_async_(tensor, 0, str(number)) for number, tensor in enumerate(tensors)
    ]
    for handle in handles:
        hvd.synchronize(handle)


if __name__ == "__main__":
    model, path = sys.argv[1:]
    serve(path, BroadcastRank(model))
