"""Starting Horovod's jobs: `run` for functions, `launch` for commands."""

from allstep import run

__all__ = ["run"]
