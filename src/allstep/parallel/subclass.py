"""Optimizers made of others without calling a constructor: so any class can be wrapped."""

from typing import Any

from torch.optim import Optimizer


def wrapped(optimizer: Optimizer, added: type, **methods: Any) -> Any:
    """An optimizer of a new class: the given one's, with `added` in front and the same name. It
    shares groups and state.

    methods: further ones of the new class.
    """
    own = optimizer.__class__
    return like(
        optimizer,
        type(own.__name__, (added, own), {"__module__": "horovod.torch.optimizer", **methods}),
    )


def like(optimizer: Optimizer, cls: type) -> Any:
    """An optimizer of class `cls` with all that the given one holds."""
    made: Any = object.__new__(cls)
    # A scheduler leaves its own `step` on the instance; it belongs to that one.
    made.__dict__.update(
        {name: value for name, value in optimizer.__dict__.items() if name != "step"}
    )
    return made
