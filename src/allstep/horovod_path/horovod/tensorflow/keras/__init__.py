"""Horovod's name for allstep's front-end for the Keras that TensorFlow uses."""

from ... import _front_end  # noqa: TID252

__all__ = _front_end.fill(
    globals(), _front_end.tensorflows_keras(), _front_end.framework_of_tensorflows_keras()
)
