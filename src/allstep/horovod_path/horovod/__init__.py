"""Horovod's names for allstep's objects, for scripts that were written for Horovod.

This folder is on no import path by default: `allstep run --as-horovod` and `bin/horovodrun` put it
on the PYTHONPATH of the workers, and `allstep horovod-path` prints it for other launchers.
"""

from allstep.launch.horovod import API_VERSION

from .runner import run

__version__ = API_VERSION
__all__ = ["__version__", "run"]
