"""What the curve means for a goal, in one sentence.

```
reached      a measured size and all larger ones reach it
more data    the whole 90% range of the samples needed is finite: so many times the data
no amount    in 19 of 20 redrawn curves of every law no amount is enough
undecided    anything else, with what each law needs
```

A multiple above `_NEVER` counts as infinite: no dataset grows by that.
"""

import math
from typing import Any, NamedTuple

from allstep.console.quantities import count
from allstep.study.data.learning_curve import Curve, Points, Range

SAFE = 10
"""Multiple of the data up to which the curve is extrapolated."""
_NEVER = 1000.0


class Verdict(NamedTuple):
    """What a goal needs."""

    kind: str
    """One of "reached", "more data", "no amount", "undecided" and "no curve"."""
    text: str
    times: Range | None = None
    """Multiple of the training split that the goal needs; None if it is reached or unknown."""

    def as_json(self) -> dict[str, Any]:
        """Return the verdict as JSON values; infinite multiples are None."""
        times = self.times and [each if math.isfinite(each) else None for each in self.times[:3]]
        return {"kind": self.kind, "text": self.text, "times": times}


def judge(points: Points, curve: Curve | None, goal: float, whole: int) -> Verdict:
    """Return what the accuracy `goal` needs, in multiples of `whole` samples.

    The sentence holds for the model and the number of updates of the study. Without a curve the
    goal is reached or unknown.
    """
    error, named = 1 - goal, f"an accuracy of {100 * goal:.4g}%"
    if (enough := _reached(points, error)) is not None:
        return Verdict("reached", f"{named} is reached with {enough:,.0f} samples.")
    if curve is None:
        return Verdict("no curve", f"What {named} needs is unknown without a curve.")
    times = _multiples(curve.needed(error), whole)
    if math.isfinite(times.high):
        return Verdict("more data", _more(named, times, whole), times)
    if math.isinf(times.low):
        return Verdict("no amount", _no_amount(named, curve, error), times)
    return Verdict("undecided", _undecided(named, curve, times), times)


def _reached(points: Points, error: float) -> float | None:
    """Return the smallest size from which on all sizes have at most this error."""
    enough = None
    for samples, found in reversed(list(zip(points.samples, points.errors, strict=True))):
        if found > error:
            break
        enough = samples
    return enough


def _multiples(needed: Range, whole: int) -> Range:
    low, value, high, *by_law = (
        math.inf if each > _NEVER * whole else each / whole
        for each in (needed.low, needed.value, needed.high, *needed.by_law)
    )
    return Range(value, low, high, tuple(by_law))


def _more(named: str, times: Range, whole: int) -> str:
    far = f" More than {SAFE} times is far beyond the points." if times.high > SAFE else ""
    return (
        f"{named} needs about {times.value:.3g} times the data ({times.low:.3g} to"
        f" {times.high:.3g} times), {count(round(times.value * whole))} samples.{far}"
    )


def _no_amount(named: str, curve: Curve, error: float) -> str:
    floor = curve.floor
    if floor.low < error:
        return f"{named} is out of reach with this model: {_NEVER:,.0f} times the data is too few."
    return (
        f"No amount of data is enough for {named} with this model: the error stays above"
        f" {floor.low:.2%} (floor {floor.value:.2%}, at most {floor.high:.2%}); the goal is"
        f" {error:.2%}."
    )


def _undecided(named: str, curve: Curve, times: Range) -> str:
    names = ("with a floor", "without one") if len(times.by_law) > 1 else ("the curve",)
    by_fit = ", ".join(
        f"{name} {_times(each)}" for name, each in zip(names, times.by_law, strict=True)
    )
    return (
        f"The points do not decide how much more data {named} needs: {by_fit}; at least"
        f" {times.low:.3g} times the data."
    )


def _times(multiple: float) -> str:
    return "no amount is enough" if math.isinf(multiple) else f"{multiple:.3g} times"
