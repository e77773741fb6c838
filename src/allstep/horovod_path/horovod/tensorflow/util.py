"""The function of Horovod's `horovod.tensorflow.util` that scripts and tests call."""

import tensorflow as tf


def _executing_eagerly() -> bool:
    """Return whether operations run at once: not in a graph."""
    return bool(tf.executing_eagerly())
