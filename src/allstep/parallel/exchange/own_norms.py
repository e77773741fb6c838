"""Norms and clipping of gradients that are not combined with those of other ranks."""

from collections.abc import Sequence

from torch import Tensor

from allstep.comm.op.gradient_norms import GradientNorms, Squares, Wanted, values_of


def alone(gradients: Sequence[Tensor], weight: float | None, wanted: Wanted) -> GradientNorms:
    """Return the norms in a world of one rank, whose own gradient is the mean."""
    squares = Squares()
    for gradient in gradients:
        squares.add(values_of(gradient))
    total = squares.total()
    return GradientNorms(
        (total,) if wanted.own else (), (1.0 if weight is None else float(weight),), total
    )


def scale(gradients: Sequence[Tensor], factor: float) -> None:
    """Multiply gradients by a factor, in place."""
    for gradient in gradients:
        # Without detach(): a detached sparse gradient would keep its values.
        gradient.mul_(factor)
