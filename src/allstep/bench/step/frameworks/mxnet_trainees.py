"""MXNet: a hybridized Gluon model with a plain Trainer, and with `DistributedTrainer`.

There is no row for the bridge: a DistributedTrainer of one rank does not cross it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import allstep.mxnet as hvd
from allstep.bench.step.frameworks.tasks import TRAINER
from allstep.bench.step.frameworks.trainee import Contenders, Trainee
from allstep.bench.step.result import ALONE
from allstep.mxnet.framework import mx

nn = mx.gluon.nn
_OPTIONS = {"learning_rate": 0.001, "momentum": 0.9}


class GluonTrainee(Trainee):
    """A model and a trainer; `make_trainer` has the arguments of Gluon's Trainer."""

    def __init__(self, name: str, make_trainer: Callable[..., Any]) -> None:
        mx.random.seed(0)
        self._model = nn.HybridSequential()
        self._model.add(*_LAYERS[name]())
        self._model.initialize(mx.init.Xavier())
        self._model.hybridize()
        self._loss = mx.gluon.loss.SoftmaxCrossEntropyLoss()
        self._trainer = make_trainer(self._model.collect_params(), "sgd", dict(_OPTIONS))

    def start(self) -> None:
        """Do nothing."""

    def step(self, images: Any, labels: Any) -> Any:
        """Run one training step and return the loss."""
        # MXNet's images have their channels first.
        inputs = mx.nd.array(images.transpose(0, 3, 1, 2))
        with mx.autograd.record():
            loss = self._loss(self._model(inputs), mx.nd.array(labels))
        loss.backward()
        self._trainer.step(len(labels))
        return loss.mean()

    def finish(self) -> None:
        """Wait for MXNet's threads."""
        mx.nd.waitall()


def _cnn() -> Sequence[Any]:
    convolutions = [
        layer
        for width in (32, 64)
        for layer in (nn.Conv2D(width, 3, padding=1, activation="relu"), nn.MaxPool2D())
    ]
    return [*convolutions, nn.Flatten(), nn.Dense(128, activation="relu"), nn.Dense(10)]


def _dense() -> Sequence[Any]:
    hidden = [nn.Dense(width, activation="relu") for width in (4096, 8192, 2304)]
    return [*hidden, nn.Dense(1000)]


_LAYERS: dict[str, Callable[[], Sequence[Any]]] = {"cnn": _cnn, "dense": _dense}


def contenders(model: str, rank: int, size: int) -> Contenders:
    """Return what this worker trains, by the names of the rows."""
    hvd.init()
    return {
        ALONE: lambda: GluonTrainee(model, mx.gluon.Trainer),
        TRAINER: lambda: GluonTrainee(model, hvd.DistributedTrainer),
    }
