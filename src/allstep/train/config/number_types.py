"""The types of numbers in a config, with their ranges.

A config may come from another person or contain a typo: no number in it may start 100,000 threads
or allocate all memory. Each bound is far above useful values, and low enough to be harmless.
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from allstep.machine import MAX_TASKS
from allstep.train.config.part_of_data import EXPECTED, parse_part


def _in_range(low: int, high: int) -> Any:
    """Return the annotations of an integer type from `low` to `high`."""
    return (Field(strict=True), _bounded(low, high))


def _bounded(low: float, high: float) -> AfterValidator:
    """Return a validator for numbers from `low` to `high`; its error names both bounds.

    NaN is outside every range.
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
"""Samples of an update. Memory limits them further, once the data is known."""
_MAX_PER_WORKER = 1 << 20
"""Times MAX_TASKS workers this is MAX_BATCH, so that a resolved config is valid."""

Count = Annotated[int, *_in_range(1, 1_000_000_000)]
"""A number of steps, updates or evaluations, which needs no memory."""
Whole = Annotated[int, *_in_range(0, 1 << 60)]
"""A number of samples that are held out or skipped."""
Seed = Annotated[int, *_in_range(0, (1 << 63) - 1)]
"""A seed for torch, numpy and the loaders; torch's signed 64 bits are the narrowest range."""
Loaders = Annotated[int, *_in_range(0, MAX_TASKS)]
Batch = Annotated[int, *_in_range(1, MAX_BATCH)]
PerWorker = Annotated[int, *_in_range(1, _MAX_PER_WORKER)]
Pixels = Annotated[int, *_in_range(1, 1 << 32)]
"""Pixels of an image; the largest JPEG, 65,535 x 65,535, has fewer."""
Classes = Annotated[int, *_in_range(1, 1 << 24)]
"""A number of classes, each of which needs a row of weights."""
Label = Annotated[int, *_in_range(0, 1 << 31)]
Epochs = Annotated[int, *_in_range(1, 1_000_000)]
Kept = Annotated[int, *_in_range(1, 100_000)]
"""A number of checkpoints on disk."""
_MAX_REAL = 1e9
"""Largest learning rate, decay, seconds or epochs; the product of three of them and a batch is
still in the range of float32."""
Positive = Annotated[float, _bounded(1e-15, _MAX_REAL)]
NotNegative = Annotated[float, _bounded(0.0, _MAX_REAL)]
Real = Annotated[float, _bounded(-_MAX_REAL, _MAX_REAL)]
Share = Annotated[float, Field(ge=0, le=1)]
MAX_WEIGHT = 1 << 20
"""Largest number in `shares`: that of `data.order`, which imports numpy."""


def _shares(value: Any) -> Any:
    """Return `value` if it may be the shares of some number of workers; one error for all else."""
    numbers = value if isinstance(value, list | tuple) else ()
    if value in ("even", "speed") or (
        numbers and all(type(each) is int and 1 <= each <= MAX_WEIGHT for each in numbers)
    ):
        return value
    raise PydanticCustomError(
        "shares",
        "a number from 1 to {high} per worker, such as [3, 1], or 'even' or 'speed'",
        {"high": MAX_WEIGHT},
    )


Shares = Annotated[Literal["even", "speed"] | tuple[int, ...], BeforeValidator(_shares)]
"""Parts of a global batch by worker."""
Decay = Annotated[float, Field(ge=0, lt=1)]


def _part(value: Any) -> Any:
    """Return `value` if it is a part of the training samples."""
    try:
        parse_part(value)
    except ValueError:
        raise PydanticCustomError("part", EXPECTED) from None
    return value


Part = Annotated[int | float | str, BeforeValidator(_part)]
"""A number of training samples, or a fraction of them; see `part_of_data`."""
