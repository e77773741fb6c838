"""Marks on gradients that came out of a tape of ours: an optimizer does not reduce them again.

A mark is an attribute of the tensor, eager or symbolic, so it ends with the tensor, and tensors of
different graphs cannot be mistaken for each other. An operation on a gradient (clipping by hand)
returns another tensor, without a mark.
"""

from collections.abc import Sequence
from typing import Any


def mark_reduced(grad: Any) -> Any:
    """Mark a gradient as reduced, so that an optimizer of ours does not reduce it again."""
    if grad is not None:
        grad._allstep_reduced = True
    return grad


def is_reduced(grad: Any) -> bool:
    """Return whether a gradient came out of our tape."""
    return getattr(grad, "_allstep_reduced", False)


def without_reduced(grads: Sequence[Any], passes: int) -> list[Any]:
    """Return the gradients that an optimizer has to reduce, None for those that are reduced.

    `passes`: the optimizer's `backward_passes_per_step`. Raise ValueError if it is above 1 and a
    gradient is reduced: reduced gradients cannot be accumulated before the reduction.
    """
    if passes > 1 and any(is_reduced(grad) for grad in grads):
        raise ValueError(
            f"gradients of hvd.DistributedGradientTape found backward_passes_per_step={passes}: the"
            " tape reduces in every pass; use tf.GradientTape with this optimizer"
        )
    return [None if is_reduced(grad) else grad for grad in grads]
