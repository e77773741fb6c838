"""A chain of operations: random numbers for a whole batch, then each image into the batch's memory.

```
draw(seed, epoch, samples) ----------------------> Draws        once per batch, vectorized
                                                     |
stored bytes or array --one(data, out, draws, row)---+--> out   (height, width, channels) uint8,
                                                     |          part of the batch's memory
small equal arrays -------many(data, out, draws)-----+--> out   (n, height, width, channels),
                                                     |          if all operations support it
batch on its device --on_batch(data, target, draws)--+--> data, target    mixup, cutmix, Normalize
```

If the first operation is a crop (`Frame`), decoding and cropping are one step, and pixels outside
the crop are not decoded if the format allows that. Later operations change the image in place.

Random numbers depend on (seed, epoch, sample) and the operation's name. Therefore the result does
not depend on the worker or the number of workers, and adding an operation does not change the
random numbers of the others.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from allstep.data.augment.crop import cropped
from allstep.data.augment.frame import Frame
from allstep.data.augment.operation import Operation
from allstep.data.augment.user_function import Call
from allstep.data.image.decode import decode
from allstep.data.image.limit import MAX_PIXELS
from allstep.data.image.pixels import Pixels
from allstep.data.random.draws import Draws
from allstep.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, int, int]


class BatchOperation(Protocol):
    """An operation on a whole batch, on the device where the batch is."""

    def __call__(
        self, data: "Tensor", target: "Tensor", draws: Draws, stream: str
    ) -> tuple["Tensor", "Tensor"]:
        """Return data and target after this step.

        `data` is (n, channels, height, width), `target` is (n,) or (n, classes).
        """


class Transform:
    """The steps from stored samples to the model's input.

    Example: `Transform(RandomResizedCrop(224), Flip(), batch=[Normalize(mean, std)])`.

    `operations` are those of `allstep.data.augment` and user functions: `f(image)` or `f(image,
    rng)`, with a uint8 array (height, width, channels) as input and output. `batch` lists
    operations on whole batches; they run on the batch's device. `channels` is 3 (RGB, the default)
    or 1 (grey). `shape` (height, width, channels) of the output is needed only if a user function
    changes the size. Images of more than `max_pixels` count as bad samples.
    """

    shape: Shape | None
    """(height, width, channels) of the output; None if the source's arrays keep their shape."""
    releases_gil: bool
    """Whether all operations release the GIL; False if one of them is a user function."""
    num_classes: int | None = None
    """Number of classes for mixup and cutmix that have none of their own.

    None: the number that the loader's source knows.
    """

    def __init__(
        self,
        *operations: Operation | Callable[..., Any],
        batch: Sequence[BatchOperation] = (),
        channels: int = 3,
        shape: Shape | None = None,
        max_pixels: int = MAX_PIXELS,
    ) -> None:
        if channels not in (1, 3):
            raise ConfigError(f"images have 3 channels (RGB) or 1 (grey), not {channels}")
        self.operations = tuple(_operation(each) for each in operations)
        self.batch = tuple(_batch_operation(each) for each in batch)
        self.channels = channels
        self.max_pixels = max_pixels
        self.shape = shape or self._shape()
        self.releases_gil = all(operation.releases_gil for operation in self.operations)
        self._streams = _streams(self.operations)
        self._batch_streams = _streams(self.batch)
        self._first = (
            self.operations[0]
            if self.operations and isinstance(self.operations[0], Frame)
            else None
        )

    def draw(self, seed: int, epoch: int, samples: NDArray[np.int64]) -> Draws:
        """Return all random numbers of a batch; row i is for `samples[i]`."""
        draws = Draws(seed, epoch, np.asarray(samples, dtype=np.int64))
        pairs = zip(self.operations, self._streams, strict=True)
        parameters = tuple(operation.draw(draws, stream) for operation, stream in pairs)
        return Draws(seed, epoch, draws.samples, parameters)

    def one(self, data: Any, out: Pixels, draws: Draws, row: int) -> None:
        """Write one sample into `out` (height, width, channels).

        Raises ValueError if `data` is not an image that can be decoded.
        """
        image = self._decoded(data, out, draws, row)
        for number in range(self._first is not None, len(self.operations)):
            operation = self.operations[number]
            if isinstance(operation, Call):
                image = operation.call(image, draws, row, self._streams[number])
            else:
                image = operation.one(image, draws.parameters[number][row])
        if image is not out:
            self._place(image, out)

    def many(self, data: NDArray[Any], out: Pixels, draws: Draws) -> bool:
        """Write small images of one shape into `out` (n, height, width, channels).

        Return False if an operation does not support this; then `out` is undefined and the caller
        uses `one`.
        """
        if data.dtype != np.uint8 or any(
            type(each).many is Operation.many for each in self.operations
        ):
            return False
        images = data[..., None] if data.ndim == 3 else data
        if images.ndim != 4 or images.shape[3] != out.shape[3]:
            return False
        return self._many(images, out, draws)

    def on_batch(
        self, data: "Tensor", target: "Tensor", draws: Draws, num_classes: int | None = None
    ) -> tuple["Tensor", "Tensor"]:
        """Return data and target after the batch operations, computed on the device of `data`.

        `num_classes` is used for mixup and cutmix if neither they nor the transform have a number.
        """
        for operation, stream in zip(self.batch, self._batch_streams, strict=True):
            if getattr(operation, "num_classes", 0) is None:
                classes = self.num_classes or num_classes
                operation = operation.for_classes(classes)  # type: ignore[attr-defined]
            data, target = operation(data, target, draws, stream)
        return data, target

    def describe(self) -> str:
        """Return one line for logs that lists the steps in order."""
        steps = [repr(each) for each in (*self.operations, *self.batch)]
        return " > ".join(steps) if steps else "images as they are"

    def __repr__(self) -> str:
        parts = [repr(each) for each in self.operations]
        parts += [f"batch=[{', '.join(repr(each) for each in self.batch)}]"] if self.batch else []
        parts += [f"channels={self.channels}"] if self.channels != 3 else []
        return f"Transform({', '.join(parts)})"

    def _shape(self) -> Shape | None:
        sizes = [size for operation in self.operations if (size := operation.resizes())]
        return (*sizes[-1], self.channels) if sizes else None

    def _decoded(self, data: Any, out: Pixels, draws: Draws, row: int) -> Pixels:
        """Return the decoded image, cropped if the first operation is a crop.

        The caller may change the image in place.
        """
        if self._first is None:
            return decode(data, out.shape[2], self.max_pixels)
        into = out if out.shape[:2] == self._first.size else None
        numbers = draws.parameters[0][row]
        return cropped(data, self._first, numbers, out.shape[2], into, self.max_pixels)

    def _many(self, images: Pixels, out: Pixels, draws: Draws) -> bool:
        if images.shape == out.shape:
            # A copy, because operations may change images in place.
            out[...] = images
            images = out
        else:
            images = images.copy()
        for operation, table in zip(self.operations, draws.parameters, strict=True):
            done = operation.many(images, table)
            if done is None:
                return False
            images = done
        if images.shape != out.shape:
            return False
        if images is not out:
            out[...] = images
        return True

    def _place(self, image: Pixels, out: Pixels) -> None:
        if image.shape != out.shape:
            calls = [each for each in self.operations if isinstance(each, Call)]
            room = f"{image.shape}, the batch has room for {out.shape}"
            if calls:
                raise ConfigError(
                    f"after {calls[-1]!r} an image is {room}: give Transform the shape that"
                    " comes out"
                )
            raise ValueError(f"an image is {room}: let the transform begin with a crop or Resize")
        out[...] = image


def _operation(each: Operation | Callable[..., Any]) -> Operation:
    if isinstance(each, Operation):
        return each
    if isinstance(each, type) or not callable(each):
        hint = f": write {each.__name__}(...)" if isinstance(each, type) else ""
        raise ConfigError(f"{each!r} is neither an operation nor a function of an image{hint}")
    if hasattr(each, "on_batches"):
        raise ConfigError(f"{each!r} works on batches: Transform(..., batch=[{each!r}])")
    return Call(each)


def _batch_operation(each: Any) -> BatchOperation:
    if isinstance(each, Operation):
        raise ConfigError(f"{each!r} works on images, not on batches: put it before `batch=`")
    if isinstance(each, type) or not callable(each):
        raise ConfigError(
            f"{each!r} is not an operation on batches; Normalize, Mixup and Cutmix are"
        )
    batch_operation: BatchOperation = each
    return batch_operation


def _streams(operations: Iterable[Any]) -> tuple[str, ...]:
    """Return a name for the random numbers of each operation.

    It is the class name, with a count from the second operation of that class on.
    """
    seen: Counter[str] = Counter()
    names = []
    for operation in operations:
        name = type(operation).__name__
        names.append(f"{name}:{seen[name]}" if seen[name] else name)
        seen[name] += 1
    return tuple(names)
