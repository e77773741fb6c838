"""A user's own function as a step of a transform.

`f(image)` or `f(image, rng)`: uint8 array (height, width, channels) in, the same kind out, of
any size. `rng` is a `numpy.random.Generator` of this sample's own at this epoch.
"""

import inspect
import pickle
from collections.abc import Callable
from typing import Any

import cloudpickle  # type: ignore[import-untyped]  # it has no types
import numpy as np

from allstep.data.augment.operation import Operation
from allstep.data.image.pixels import Pixels
from allstep.data.random.draws import Draws
from allstep.errors import ConfigError


class Call(Operation):
    """Calls `function`; whether it wants a generator is looked up once, in its signature."""

    releases_gil = False

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self._wants_rng = _wants_rng(function)

    def call(self, image: Pixels, draws: Draws, row: int, stream: str) -> Pixels:
        """The image that the function makes of `image`."""
        arguments = (image, draws.generator(row, stream)) if self._wants_rng else (image,)
        try:
            result = self.function(*arguments)
        except ValueError as error:  # which a loader takes for an image that cannot be decoded
            raise RuntimeError(
                f"{self!r} failed on an image of shape {image.shape}: {error}"
            ) from error
        return self._checked(result)

    def __repr__(self) -> str:
        return str(getattr(self.function, "__name__", None) or repr(self.function))

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (_pickled(self.function),)

    def _checked(self, result: Any) -> Pixels:
        if not isinstance(result, np.ndarray) or result.dtype != np.uint8 or result.ndim != 3:
            kind = (
                f"{result.dtype} array of shape {result.shape}"
                if isinstance(result, np.ndarray)
                else type(result).__name__
            )
            raise ConfigError(
                f"{self!r} gave a {kind}; a step gives a uint8 array (height, width, channels)"
            )
        return result


def _wants_rng(function: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a built-in without a signature
        return False
    places = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed = [p for p in places if p.default is p.empty]
    if len(needed) > 2:
        raise ConfigError(
            f"{function!r} wants {len(needed)} arguments; a step is f(image) or f(image, rng)"
        )
    return len(needed) == 2 or (len(places) > 1 and places[1].name in ("rng", "generator"))


def _pickled(function: Callable[..., Any]) -> bytes:
    """Plain pickle where another process can find the function by its name, else the function
    itself."""
    if getattr(function, "__module__", None) != "__main__":
        try:
            return pickle.dumps(function)
        except (pickle.PicklingError, AttributeError, TypeError):
            pass
    dumped: bytes = cloudpickle.dumps(function)
    return dumped


def _restored(dumped: bytes) -> Call:
    return Call(pickle.loads(dumped))
