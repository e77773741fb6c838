"""Horovod's name for allstep.tensorflow.keras: the Keras that TensorFlow uses."""

from ... import _front_end  # noqa: TID252

__all__ = _front_end.fill(
    globals(), "allstep.tensorflow.keras", _front_end.framework_of_tensorflows_keras()
)
