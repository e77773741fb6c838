"""allstep: one training script, many workers, many hosts, the accuracy of one.

This module is deliberately thin: `import allstep` loads neither torch nor numpy, so that the
command line and the launcher start fast. The names below are imported from their layer when they
are first used (PEP 562).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from allstep._version import __version__

if TYPE_CHECKING:
    from allstep.comm import init, shutdown
    from allstep.errors import AllstepError, UserError
    from allstep.launch import run
    from allstep.world import World

_HOME = {
    "AllstepError": "allstep.errors",
    "UserError": "allstep.errors",
    "World": "allstep.world",
    "init": "allstep.comm",
    "run": "allstep.launch",
    "shutdown": "allstep.comm",
}

__all__ = ["AllstepError", "UserError", "World", "__version__", "init", "run", "shutdown"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(
            f"module 'allstep' has no attribute {name!r}; it has {', '.join(__all__)}"
        )
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
