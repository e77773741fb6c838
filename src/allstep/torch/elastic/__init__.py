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

from allstep.hvd.elastic import run
from allstep.torch.elastic.sampler import ElasticSampler
from allstep.torch.elastic.state import TorchState

__all__ = ["ElasticSampler", "TorchState", "run"]
