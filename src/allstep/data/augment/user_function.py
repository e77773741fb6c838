"""A user's function as a step of a transform.

The function is `f(image)` or `f(image, rng)`. It receives and returns a uint8 array (height, width,
channels); the result may have another size. `rng` is a `numpy.random.Generator` that is specific to
this sample and epoch.
"""

import inspect
import pickle
from collections.abc import Callable
from typing import Any

# cloudpickle has no type annotations.
import cloudpickle  # type: ignore[import-untyped]
import numpy as np

from allstep.data.augment.operation import Operation
from allstep.data.image.pixels import Pixels
from allstep.data.random.draws import Draws
from allstep.errors import ConfigError


class Call(Operation):
    """A step that calls `function`.

    Its signature is inspected once to see whether it takes a generator.
    """

    releases_gil = False

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self._wants_rng = _wants_rng(function)

    def call(self, image: Pixels, draws: Draws, row: int, stream: str) -> Pixels:
        """Return the result of the function for `image`."""
        arguments = (image, draws.generator(row, stream)) if self._wants_rng else (image,)
        try:
            result = self.function(*arguments)
        # A loader would treat a ValueError as an image that cannot be decoded.
        except ValueError as error:
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
    # A built-in may have no signature.
    except (TypeError, ValueError):
        return False
    places = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed = [p for p in places if p.default is p.empty]
    if len(needed) > 2:
        raise ConfigError(
            f"{function!r} wants {len(needed)} arguments; a step is f(image) or f(image, rng)"
        )
    return len(needed) == 2 or (len(places) > 1 and places[1].name in ("rng", "generator"))


def _pickled(function: Callable[..., Any]) -> bytes:
    """Return the pickled function.

    A function that another process can import is pickled by name; others with their code
    (cloudpickle).
    """
    if getattr(function, "__module__", None) != "__main__":
        try:
            return pickle.dumps(function)
        except (pickle.PicklingError, AttributeError, TypeError):
            pass
    dumped: bytes = cloudpickle.dumps(function)
    return dumped


def _restored(dumped: bytes) -> Call:
    return Call(pickle.loads(dumped))
