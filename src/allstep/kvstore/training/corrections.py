"""Corrections of stale gradients, and the learning rate of a push, as pure functions.

=========  =========================================================================
none       as it is
lr         learning rate / max(1, age)                     (Zhang et al. 1511.05950)
delay      g + c * g * g * (w_now - w_read)      DC-ASGD   (Zheng et al. 1609.08326)
=========  =========================================================================

`delay` estimates the gradient at the present weights, with g * g in place of the Hessian. w_read
are the weights from which this party computed g. It still has them, so nothing is kept per party
(systems that keep one earlier copy for all workers correct by the wrong distance).
"""

from torch import Tensor

CORRECTIONS = ("none", "lr", "delay")
DELAY_STRENGTH = 0.04
"""The c of `delay`: MXNet's default."""


def push_lr(lr: float, samples: int, batch: int, age: int, scale: bool, correct: str) -> float:
    """Return the learning rate of a push.

    lr: for a whole batch. samples: those of the push; `scale`: count it by them (D18).
    """
    if scale:
        lr *= samples / batch
    return lr / max(1, age) if correct == "lr" else lr


def compensate(gradient: Tensor, present: Tensor, read: Tensor, strength: float) -> None:
    """Replace a gradient by its estimate at the present weights."""
    moved = (present - read).mul_(strength)
    gradient.addcmul_(gradient * gradient, moved)
