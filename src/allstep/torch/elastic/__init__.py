"""Elastic training with torch: `hvd.elastic.run`, `TorchState` and `ElasticSampler`.

`allstep.hvd.elastic` explains how it works.

    @hvd.elastic.run
    def train(state):
        for state.epoch in range(state.epoch, epochs):
            for state.batch, (data, target) in enumerate(loader):
                ...
                state.commit()

    train(hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, batch=0))
"""

from collections.abc import Callable
from typing import Any

from allstep.hvd.basics import init as _init
from allstep.hvd.basics import shutdown as _shutdown
from allstep.hvd.elastic import run_fn as _run_fn
from allstep.torch.elastic.sampler import ElasticSampler
from allstep.torch.elastic.state import TorchState

__all__ = ["ElasticSampler", "TorchState", "run"]


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a training function `func(state, ...)`, so that it survives changes of the world.

    It starts with rank 0's state on all ranks, and starts again after the world has changed.
    """
    return _run_fn(func, _reset)


def _reset() -> None:
    _shutdown()
    _init()
