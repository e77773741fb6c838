"""A step of the distributed optimizer in two parts, so that waiting and updating can be timed apart; norms and clipping between them.

    loss.backward()
    optimizer.reduce_gradients()     # wait: each rank has the mean gradients of what it will update
    optimizer.apply()                # update

With `share_weights` a rank updates only what it owns, so only these gradients are the mean; without it all are. On one rank nothing is
reduced, and the calls are the same.

**Norms.** `measure_norms = True`, before backward(), makes every reduction deliver `norms`: squared norms of each rank's own gradient and
of the mean, which is what the noise scale needs. They are taken as the gradients pass by (`allstep.comm.op.norms`).

**Clipping.** `clip_norm = c`, before backward(), scales the mean gradient as `torch.nn.utils.clip_grad_norm_` does, so that its norm is at
most c; `norms.mean` has the square of what it was before. A norm that is not finite is no error here and changes nothing: look at
`norms.mean`, and `discard()` the step.

Both also hold for `step` and `synchronize`.
"""

import math
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from allstep.comm.op.norms import GradientNorms, Squares, Wanted, values_of
from allstep.errors import ConfigError, UserError
from allstep.parallel.gradients import Gradients

_REDUCED = (
    "optimizer.{}() after optimizer.reduce_gradients(): the gradients are those of all ranks already. Call optimizer.apply() to use them, "
    "or optimizer.discard() to leave them"
)
_SYNCHRONIZED = (
    "optimizer.reduce_gradients() after optimizer.synchronize(), which has reduced them. Use one of the two: a step is "
    "`reduce_gradients(); apply()`, or `synchronize()` and `with optimizer.skip_synchronize(): step()`"
)
_NOT_REDUCED = "optimizer.apply(): there are no reduced gradients. Call optimizer.reduce_gradients() after backward(), before each apply()"


class TwoParts(Optimizer):
    """What `Distributed` is built on, which says how to reduce and how to update."""

    def _attach_parts(self) -> None:
        self._reduced = False  # by `reduce_gradients`, and `apply` has not come yet
        self._synchronized = False  # by `synchronize`, and no step has come yet
        self._clip_norm: float | None = None
        self.measure_norms = False
        self.norms: GradientNorms | None = None  # of the last reduction; None if it measured nothing

    def reduce_gradients(self) -> None:
        """The first part of a step: each rank gets the mean gradients of what it updates, which with `share_weights` is a part of them.

        `apply` must follow, or `discard`. Between them nobody may read weights that are shared: another rank may be changing them.
        """
        self._check_not_reduced("reduce_gradients")
        if self._synchronized:
            raise UserError(_SYNCHRONIZED)
        self._reduce_what_we_update()
        self._reduced = True

    def apply(self) -> None:
        """The second part of a step: the update alone."""
        if not self._reduced:
            raise UserError(_NOT_REDUCED)
        self._reduced = False
        self._opt_called = True  # for torch's schedulers, which otherwise warn that there was no step
        self._apply()

    def discard(self) -> None:
        """Instead of `apply`, on all ranks: the gradients are not used, the weights stay as they are."""
        if not self._reduced:
            raise UserError(_NOT_REDUCED.replace("apply()", "discard()"))
        self._forget_reduced()

    @property
    def clip_norm(self) -> float | None:
        """What the norm of the mean gradient may be at most; None for no limit."""
        return self._clip_norm

    @clip_norm.setter
    def clip_norm(self, limit: float | None) -> None:
        if limit is not None and not 0 < limit < math.inf:
            raise ConfigError(f"clip_norm={limit}: it must be above 0 and finite, or None for no clipping")
        self._clip_norm = limit

    def _wanted(self) -> Wanted:
        return Wanted(own=self.measure_norms, mean=self.measure_norms or self._clip_norm is not None)

    def _take_norms(self, norms: GradientNorms | None) -> float:
        """Keep them. Returns the factor by which to scale the gradients, as torch has it; 1 for none."""
        self.norms = norms
        if norms is None or self._clip_norm is None or not math.isfinite(norms.mean):
            return 1.0
        return min(1.0, self._clip_norm / (math.sqrt(norms.mean) + 1e-6))

    def _measure(self, gradients: Gradients, sparse: list[Tensor]) -> None:
        """After a reduction: the norms, and the clipping. sparse: the reduced gradients that are sparse."""
        if gradients.mean is not None:
            for each in sparse:
                gradients.mean.add(values_of(each), 1 / gradients.present)
        factor = self._take_norms(gradients.norms())
        if factor < 1.0:
            gradients.scale_by(factor)
            _scale(sparse, factor)

    def _measure_alone(self, gradients: list[Tensor], weight: float | None) -> None:
        """The same where there are no other ranks."""
        wanted = self._wanted()
        norms = alone(gradients, weight, wanted) if wanted.mean else None
        factor = self._take_norms(norms)
        if factor < 1.0:
            _scale(gradients, factor)

    def _check_not_reduced(self, name: str) -> None:
        if self._reduced:
            raise UserError(_REDUCED.format(name))

    def _forget_reduced(self) -> None:
        self._reduced = self._synchronized = False

    def _reduce_what_we_update(self) -> None:
        raise NotImplementedError

    def _apply(self) -> Any:
        raise NotImplementedError


def alone(gradients: list[Tensor], weight: float | None, wanted: Wanted) -> GradientNorms:
    """The norms in a world of one rank, whose own gradient is the mean."""
    squares = Squares()
    for gradient in gradients:
        squares.add(values_of(gradient))
    total = squares.total()
    return GradientNorms((total,) if wanted.own else (), (1.0 if weight is None else float(weight),), total)


def _scale(gradients: list[Tensor], factor: float) -> None:
    for gradient in gradients:
        gradient.mul_(factor)  # not of detach(): a sparse one would keep its values
