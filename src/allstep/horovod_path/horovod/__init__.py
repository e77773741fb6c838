"""Horovod's name for allstep: the same objects under the names that scripts written for Horovod
import.

This folder is on nobody's import path until it is asked for: `allstep run --as-horovod` and
`bin/horovodrun` put it on that of the workers, `allstep horovod-path` prints it for other
launchers.
"""

from allstep.launch.horovod import API_VERSION

from .runner import run

__version__ = API_VERSION
__all__ = ["__version__", "run"]
