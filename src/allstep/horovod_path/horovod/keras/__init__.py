"""Horovod's name for allstep.keras."""

from allstep.hvd.frameworks import KERAS

from .. import _front_end  # noqa: TID252

__all__ = _front_end.fill(globals(), "allstep.keras", KERAS)
