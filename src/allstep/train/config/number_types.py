"""The kinds of numbers in a config, with their ranges.

A config may come from another person or have a typo: no number in it may start 100,000 threads or
take all memory. Each bound is far above what is useful, and low enough to be survived.
"""

from typing import Annotated, Any

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from allstep.machine import MAX_TASKS


def _in_range(low: int, high: int) -> Any:
    """An integer from `low` to `high`."""
    return (Field(strict=True), _bounded(low, high))


def _bounded(low: float, high: float) -> AfterValidator:
    """From `low` to `high`; an error gives both, whichever of them was passed.

    Not a number is in no range.
    """

    def check(value: float) -> float:
        if not low <= value <= high:
            bounds = {
                "low": f"{low:.10g}",
                "high": f"{high:.10g}" if isinstance(high, float) else str(high),
            }
            raise PydanticCustomError("range", "a number from {low} to {high}", bounds)
        return value

    return AfterValidator(check)


MAX_BATCH = 1 << 30
"""Samples of an update. What memory allows is less, and known when the data is."""
_MOST_PER_WORKER = 1 << 20
"""Times MAX_TASKS workers it is MAX_BATCH, so that a resolved config is valid."""

Count = Annotated[int, *_in_range(1, 1_000_000_000)]
"""Of steps, updates, evaluations: what is only counted, and takes no memory."""
Whole = Annotated[int, *_in_range(0, 1 << 60)]
"""Of samples, held out or skipped."""
Seed = Annotated[int, *_in_range(0, (1 << 63) - 1)]
"""torch, numpy and the loaders all take it; torch's signed 64 bits are the narrowest."""
Loaders = Annotated[int, *_in_range(0, MAX_TASKS)]
Batch = Annotated[int, *_in_range(1, MAX_BATCH)]
PerWorker = Annotated[int, *_in_range(1, _MOST_PER_WORKER)]
Pixels = Annotated[int, *_in_range(1, 1 << 32)]
"""Of an image; 65,535 x 65,535, the largest JPEG, is less."""
Classes = Annotated[int, *_in_range(1, 1 << 24)]
"""Each takes a row of weights."""
Label = Annotated[int, *_in_range(0, 1 << 31)]
Epochs = Annotated[int, *_in_range(1, 1_000_000)]
Kept = Annotated[int, *_in_range(1, 100_000)]
"""Checkpoints on the disk."""
_MOST_REAL = 1e9
"""Rates, decays, seconds, epochs. The product of any three, and of a batch, is still a float32."""
Positive = Annotated[float, _bounded(1e-15, _MOST_REAL)]
NotNegative = Annotated[float, _bounded(0.0, _MOST_REAL)]
Real = Annotated[float, _bounded(-_MOST_REAL, _MOST_REAL)]
Share = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
