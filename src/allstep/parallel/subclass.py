"""Optimizers made from others without calling a constructor, so that any class can be wrapped."""

from typing import Any

from torch.optim import Optimizer


def wrapped(optimizer: Optimizer, added: type, **methods: Any) -> Any:
    """Return an optimizer of a new class: the given one's, with `added` as first base.

    The class has the same name; the optimizer shares groups and state. `methods`: further methods
    of the new class.
    """
    own = optimizer.__class__
    return like(
        optimizer,
        type(own.__name__, (added, own), {"__module__": "horovod.torch.optimizer", **methods}),
    )


def like(optimizer: Optimizer, cls: type) -> Any:
    """Return an optimizer of class `cls` with the attributes of the given one."""
    made: Any = object.__new__(cls)
    # A scheduler puts its own `step` on the instance; it belongs to that instance alone.
    made.__dict__.update(
        {name: value for name, value in optimizer.__dict__.items() if name != "step"}
    )
    return made
