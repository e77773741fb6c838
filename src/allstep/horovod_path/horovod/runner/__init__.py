"""Horovod's launchers: `run` calls a function on workers, `launch` is horovodrun."""

from allstep import run

__all__ = ["run"]
