"""`keras.distribution.DataParallel` on JAX, with Gloo between the processes, as a peer.

Keras splits each batch that a worker passes over all devices of all processes; a worker passes its
own share of the batch. The loss is that of all ranks.
"""

from typing import Any

from allstep.bench.step.frameworks.trainee import Peer, Trainee


def start(model: str, place: Any) -> Peer:
    """Connect the workers, and return what makes the model."""
    import jax

    config: Any = jax.config
    config.update("jax_cpu_collectives_implementation", "gloo")
    import keras

    keras.distribution.initialize(f"127.0.0.1:{place.ports[0]}", place.size, place.rank)
    keras.distribution.set_distribution(keras.distribution.DataParallel())
    return Peer(lambda: _make(model), _meet)


def _meet() -> None:
    from jax.experimental.multihost_utils import sync_global_devices

    barrier: Any = sync_global_devices
    barrier("turn")


def _make(model: str) -> Trainee:
    from allstep.bench.step.frameworks.keras_models import make_sgd
    from allstep.bench.step.frameworks.keras_trainees import KerasTrainee

    return KerasTrainee(model, make_sgd())
