"""Checks of the options of the reference models, before a model is built and without torch.

```
model.options: {widths: [0]}  ->  "expected a list of ... whole numbers from 1 to 4096, found [0]"
```

torch itself accepts a layer of zero channels and fails in the first step, in a worker. A layer of a
billion channels needs all memory. Each limit is several times what published models use.

A check returns a description of the expected value, or None if the value is right.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from allstep.errors import ConfigError, cut

Check = Callable[[Any], str | None]


def whole(low: int, high: int) -> Check:
    """Return a check for an integer from `low` to `high`."""
    expected = f"a whole number from {low} to {high}"
    return lambda value: None if _is_whole(value, low, high) else expected


def real(low: float, high: float) -> Check:
    """Return a check for a finite number from `low` to `high`."""

    def check(value: Any) -> str | None:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        is_right = is_number and math.isfinite(value) and low <= value <= high
        return None if is_right else f"a number from {low:g} to {high:g}"

    return check


def truth(value: Any) -> str | None:
    """Check that the value is True or False."""
    return None if isinstance(value, bool) else "true or false"


def channels(fewest: int, most: int) -> Check:
    """Return a check for a list of `fewest` to `most` channel counts, one per layer."""
    many = f"{most}" if fewest == most else f"{fewest} to {most}"

    def check(value: Any) -> str | None:
        is_list = isinstance(value, list | tuple) and fewest <= len(value) <= most
        is_right = is_list and all(_is_whole(each, 1, _MAX_CHANNELS) for each in value)
        return None if is_right else f"a list of {many} whole numbers from 1 to {_MAX_CHANNELS}"

    return check


def _is_whole(value: Any, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


_MAX_CHANNELS = 4096
"""Limit of a layer's channels: a 3x3 convolution of 4096 to 4096 has 0.6 GB of weights."""
HIDDEN = whole(1, 16_384)
DROPOUT = real(0, 1)


def check_values(checks: Mapping[str, Check], options: Mapping[str, Any]) -> None:
    """Raise ConfigError for the first option whose value its check rejects."""
    for key, value in options.items():
        if key in checks and (expected := checks[key](value)) is not None:
            found = cut(repr(value))
            raise ConfigError(
                f"config key 'model.options.{key}': expected {expected}, found {found}"
            )
