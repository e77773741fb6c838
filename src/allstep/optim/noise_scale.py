"""The gradient noise scale: up to which batch more samples in an update are worth it (McCandlish et
al. 2018, https://arxiv.org/abs/1812.06162).

G is the true gradient, Sigma the covariance of a single sample's gradient. The gradient of a batch
of B samples has

```
E |G_B|^2 = |G|^2 + tr(Sigma) / B
```

so two batch sizes give two equations, and their solution (appendix A.1) is unbiased:

```
|G|^2     = (B * |G_B|^2 - b * |G_b|^2) / (B - b)      small batch b: each worker's;
tr(Sigma) = (|G_b|^2 - |G_B|^2) / (1/b - 1/B)          large batch B: their mean
scale     = tr(Sigma) / |G|^2
```

Each estimate is poor, and the ratio of two poor ones is biased, so both are averaged over steps
first (`Running`). With a batch of B a run needs 1 + scale/B times the fewest possible updates and 1
+ B/scale times the fewest possible samples: at B = scale, twice of both.

This is the simple noise scale, which assumes the same curvature in all directions; the best batch
is only of its order of magnitude. It grows during a run, mostly by a factor of ten and more.

All of it is arithmetic on squared norms and counts. With several workers, use their norms
(`from_workers`); with one worker, use those of micro-batches (`measure`).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from allstep.errors import ConfigError


@dataclass(frozen=True)
class Estimate:
    """The estimates of one step; unbiased, so either may be negative."""

    gradient_sq: float
    """|G|^2, the squared norm of the true gradient."""
    noise: float
    """tr(Sigma), the variance of a single sample's gradient."""


def estimate(small_sq: float, small: float, large_sq: float, large: float) -> Estimate:
    """Estimate gradient and noise from the gradients of a small and a large batch.

    `small_sq`, `large_sq`: squared norms of the gradients. `small`, `large`: samples of the
    batches.
    """
    if not 0 < small < large:
        raise ConfigError(
            "the noise scale needs gradients of two batch sizes, a small and a large one, not of"
            f" {small:g} and {large:g} samples"
        )
    gradient_sq = (large * large_sq - small * small_sq) / (large - small)
    return Estimate(gradient_sq, (small_sq - large_sq) / (1 / small - 1 / large))


def from_workers(norms_sq: Sequence[float], counts: Sequence[float], mean_sq: float) -> Estimate:
    """Estimate gradient and noise from the mean gradients of several workers.

    `norms_sq`: squared norm of each worker's mean gradient. `counts`: samples of each worker.
    `mean_sq`: squared norm of the mean over all samples.

    Workers may have different numbers of samples, or none. Weighted by them, p workers with B
    samples in total are equivalent to one batch of B / p: the sum of (b_i / B) * |G_i|^2 has the
    mean |G|^2 + tr(Sigma) * p / B.
    """
    pairs = [(norm_sq, count) for norm_sq, count in zip(norms_sq, counts, strict=True) if count]
    total = sum(count for _, count in pairs)
    if len(pairs) < 2:
        raise ConfigError(
            "the noise scale needs at least 2 workers (or micro-batches) with samples, and there"
            f" is {len(pairs)}: split the batch into micro-batches"
        )
    small_sq = sum(norm_sq * count for norm_sq, count in pairs) / total
    return estimate(small_sq, total / len(pairs), mean_sq, total)


def squared_norm(gradients: Sequence[Tensor]) -> float:
    """Return the squared norm of all gradients together. Reads one number back from the device."""
    if not gradients:
        return 0.0
    return float(torch.stack(torch._foreach_norm(list(gradients))).double().square().sum())


def measure(parameters: Iterable[Tensor], losses: Iterable[tuple[Tensor, int]]) -> Estimate:
    """Run backward() of a batch in micro-batches on one worker, and return the estimate.

    `losses`: the mean loss of each micro-batch and its number of samples; best a generator, so that
    only one graph exists at a time. Adds the mean gradient over all samples to `grad`, as
    backward() of the whole batch would.
    """
    params = [parameter for parameter in parameters if parameter.requires_grad]
    sums = [torch.zeros_like(param) for param in params]
    norms_sq, counts = [], []
    for loss, count in losses:
        gradients = torch.autograd.grad(loss, params, allow_unused=True, materialize_grads=True)
        torch._foreach_add_(sums, gradients, alpha=count)
        norms_sq.append(squared_norm(gradients))
        counts.append(count)
    torch._foreach_div_(sums, max(1, sum(counts)))
    found = from_workers(norms_sq, counts, squared_norm(sums))
    for param, gradient in zip(params, sums, strict=True):
        param.grad = gradient if param.grad is None else param.grad + gradient
    return found


@dataclass
class Running:
    """The noise scale over the last steps, and its confidence interval.

    Consists of plain numbers: `Running(**asdict(running))` is the same. Means and covariances of
    both estimates are weighted by `decay` (West 1979, with decaying weights).
    """

    decay: float = 0.99
    """Weight of a step relative to the next one; 0.99 averages over about 100 steps."""
    steps: int = 0
    """Number of estimates added."""
    weight: float = 0.0
    """Sum of the weights of the steps."""
    weight_sq: float = 0.0
    """Sum of the squared weights of the steps."""
    gradient_sq: float = 0.0
    """Weighted mean of |G|^2."""
    noise: float = 0.0
    """Weighted mean of tr(Sigma)."""
    spread_gradient_sq: float = 0.0
    """Weighted sum of the squared differences of |G|^2 from its mean."""
    spread_noise: float = 0.0
    """Weighted sum of the squared differences of tr(Sigma) from its mean."""
    spread_both: float = 0.0
    """Weighted sum of the products of both differences."""

    def __post_init__(self) -> None:
        if not 0 < self.decay <= 1:
            raise ConfigError(f"noise scale: decay={self.decay} must be above 0 and at most 1")

    def add(self, found: Estimate) -> None:
        """Add the estimate of one step.

        An estimate that is not finite has no information and would make all later values invalid,
        so it is ignored.
        """
        if not (math.isfinite(found.gradient_sq) and math.isfinite(found.noise)):
            return
        self.steps += 1
        self.weight = self.decay * self.weight + 1
        self.weight_sq = self.decay**2 * self.weight_sq + 1
        from_gradient, from_noise = found.gradient_sq - self.gradient_sq, found.noise - self.noise
        self.gradient_sq += from_gradient / self.weight
        self.noise += from_noise / self.weight
        rest = found.noise - self.noise
        self.spread_gradient_sq = self.decay * self.spread_gradient_sq + from_gradient * (
            found.gradient_sq - self.gradient_sq
        )
        self.spread_noise = self.decay * self.spread_noise + from_noise * rest
        self.spread_both = self.decay * self.spread_both + from_gradient * rest

    @property
    def scale(self) -> float:
        """tr(Sigma) / |G|^2, in samples; infinite while the gradient is not significant."""
        return max(0.0, self.noise) / self.gradient_sq if self.gradient_sq > 0 else math.inf

    def interval(self, z: float = 1.96) -> tuple[float, float]:
        """Return the confidence interval of the scale (Fieller's theorem for a ratio of means).

        `z`: number of standard errors (default: 1.96, for 95%). The upper end is infinite while
        |G|^2 might be zero. Steps count as independent, which is not quite true for neighboring
        steps.
        """
        share = self.weight_sq / self.weight**2 if self.weight else 1.0
        if self.steps < 2 or share >= 1:
            return 0.0, math.inf
        # From a sum of squares to z^2 times the variance of the mean.
        each = z * z * share / (1 - share) / self.weight
        a = self.gradient_sq**2 - each * self.spread_gradient_sq
        b = self.gradient_sq * self.noise - each * self.spread_both
        c = self.noise**2 - each * self.spread_noise
        root = math.sqrt(max(0.0, b * b - a * c))
        if a <= 0 or self.gradient_sq <= 0:
            # The finite end, in a form that allows a = 0.
            low = c / (b + root) if b + root > 0 else 0.0
            return max(0.0, low), math.inf
        return max(0.0, (b - root) / a), max(0.0, (b + root) / a)

    def advice(self, batch: int) -> str:
        """Return advice about this batch, in samples."""
        return advice(batch, self.scale, *self.interval())


def advice(batch: int, scale: float, low: float, high: float) -> str:
    """Describe how the batch compares with the noise scale, what that costs, and what to do.

    `batch`, `scale`, `low`, `high`: samples; `low` and `high` are the ends of the 95% interval.
    """
    if batch < 1:
        raise ConfigError(f"batch {batch}: it must be at least 1")
    if not math.isfinite(high):
        known = f"at least {low:.0f} samples" if low > 0 else "not known yet"
        what = "Larger batches may help; measure" if low > batch else "Measure"
        return (
            f"noise scale {known}: the gradient is not significant in the noise. {what} over more"
            " steps."
        )
    text = f"noise scale about {scale:.0f} samples (95%: {low:.0f} to {high:.0f}); batch {batch}"
    if scale <= 0:
        return f"{text}: no noise at all. A smaller batch does as much in an update."
    updates, samples = 1 + scale / batch, 1 + batch / scale
    saved = 100 * (1 - (1 + scale / (2 * batch)) / updates)
    cost = (
        f"needs {updates:.2g} times the fewest updates and {samples:.2g} times the fewest samples"
    )
    return (
        f"{text} {cost}. {_verdict(batch, low, high)} Twice the batch would save {saved:.0f}% of"
        " the updates."
    )


def _verdict(batch: int, low: float, high: float) -> str:
    if batch < low:
        return "There is room for a larger batch."
    if batch > high:
        return "It is past the critical batch: more workers save little time."
    return "It is near the critical batch: a fair trade of time for samples."
