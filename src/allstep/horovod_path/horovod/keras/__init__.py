"""Horovod's name for allstep.keras; for allstep.keras2 where TensorFlow uses Keras 2."""

from allstep.hvd.frameworks import KERAS, KERAS_2

from .. import _front_end  # noqa: TID252

_NAME = _front_end.plain_keras()
__all__ = _front_end.fill(globals(), _NAME, KERAS_2 if _NAME.endswith("2") else KERAS)
