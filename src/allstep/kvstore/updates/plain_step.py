"""An optimizer's step without what torch puts around it, for updates of small slices.

torch wraps `step` for profilers and hooks, and looks for the fastest implementation at each call.
Both take as long as the update of 4 KB. The optimizers of a store have no hooks, and on a CPU there
is one implementation, so the result is the same, bit by bit.
"""

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer


def plain_step(optimizer: Optimizer) -> Callable[[], Any]:
    """Return a function that makes a step of `optimizer`, which has one parameter group."""
    group = optimizer.param_groups[0]
    # What torch would choose for a parameter on a CPU.
    if "foreach" in group and group["foreach"] is None and not group.get("fused"):
        group["foreach"] = False
    # A step of a class that torch has not wrapped stays as it is.
    step: Any = type(optimizer).step
    inner = getattr(step, "__wrapped__", None) if getattr(step, "hooked", False) else None
    return optimizer.step if inner is None else inner.__get__(optimizer)
