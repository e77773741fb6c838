"""A rank of `allstep bench recover --part quiet`: trains the small CNN on request, loses no worker.

    python -m allstep.bench.recover.quiet_rank SOCKET

The same program runs in a world formed by the elastic launcher and in one formed by the fixed one:
`DistributedOptimizer`, and a commit of an elastic state after every ten steps. Requests and answers
are lines of JSON as in `allstep bench comm`; a turn is timed after a barrier.
"""

import sys
import time
from typing import Any

import torch

import allstep.torch as hvd
from allstep.bench.comm.rank import serve
from allstep.bench.recover.small_cnn_task import small_cnn, train_step

_STEPS_PER_COMMIT = 10


class QuietRank:
    """Executes the requests of the bench on one rank."""

    def __init__(self) -> None:
        self.names = ["steps"]
        hvd.init()
        torch.set_num_threads(1)
        self.rank, self.size = hvd.rank(), hvd.size()
        self._model, sgd, self._images, self._labels = small_cnn()
        self._optimizer = hvd.DistributedOptimizer(sgd, self._model.named_parameters())
        self._state = hvd.elastic.TorchState(self._model, self._optimizer)

    def answer(self, order: dict[str, Any]) -> dict[str, Any]:
        """Run the requested number of steps; return the seconds of one step."""
        num_steps = order["steps"]
        hvd.barrier()
        began = time.perf_counter()
        for number in range(1, num_steps + 1):
            train_step(self._model, self._optimizer, self._images, self._labels)
            if number % _STEPS_PER_COMMIT == 0:
                self._state.commit()
        return {"seconds": (time.perf_counter() - began) / num_steps}


if __name__ == "__main__":
    (path,) = sys.argv[1:]
    serve(path, QuietRank())
