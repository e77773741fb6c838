"""TensorFlow's MultiWorkerMirroredStrategy in a training loop of its own, as a peer.

`fit` of Keras 3 fails under this strategy (keras issue 20585), so the loop is written by hand: a
tf.function with `strategy.run`. The optimizer sums the gradients of the replicas.
"""

import json
import os
from collections.abc import Callable
from typing import Any

from allstep.bench.step.frameworks.trainee import Peer, Trainee


def start(model: str, place: Any) -> Peer:
    """Connect the workers, and return what makes the model."""
    workers = [f"127.0.0.1:{port}" for port in place.ports]
    os.environ["TF_CONFIG"] = json.dumps(
        {"cluster": {"worker": workers}, "task": {"type": "worker", "index": place.rank}}
    )
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    return Peer(lambda: MirroredTrainee(strategy, model, place.size), _barrier_of(strategy))


def _barrier_of(strategy: Any) -> Callable[[], Any]:
    """Return a function that waits for all workers: the sum of one number of each."""
    import tensorflow as tf

    def add() -> Any:
        return tf.distribute.get_replica_context().all_reduce("sum", tf.constant(1.0))

    # Read the result: it is there when all workers have called.
    total = tf.function(lambda: strategy.run(add))
    return lambda: float(total())


class MirroredTrainee(Trainee):
    """A model whose variables are the strategy's."""

    def __init__(self, strategy: Any, name: str, size: int) -> None:
        import tensorflow as tf

        from allstep.bench.step.frameworks.keras_models import loss, make_model, make_sgd

        with strategy.scope():
            model, optimizer, loss_of = make_model(name), make_sgd(), loss()
            optimizer.build(model.trainable_variables)

        def replica(images: Any, labels: Any) -> Any:
            with tf.GradientTape() as tape:
                # Keras divides the loss by the number of replicas.
                value = loss_of(labels, model(images, training=True))
            variables = model.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(value, variables), variables, strict=True))
            return value * size

        self._step = tf.function(lambda *batch: strategy.run(replica, args=batch))

    def start(self) -> None:
        """Do nothing."""

    def step(self, images: Any, labels: Any) -> Any:
        """Run one training step and return the loss of this rank's images."""
        return self._step(images, labels)

    def finish(self) -> None:
        """Do nothing: a step has ended when its function returns."""
