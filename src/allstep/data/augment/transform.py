"""A chain of operations, as the loader uses it: random numbers for a batch, then each image into
its place.

```
draw(seed, epoch, samples) ----------------------> Draws        once per batch, vectorised
                                                     |
stored bytes or array --one(data, out, draws, row)---+--> out   (height, width, channels) uint8, a
place in the batch's memory equal small arrays ------many(data, out, draws)------+--> out   (n,
height, width, channels): many at once, where all can
                                                     |
batch on its device --on_batch(data, target, draws)--+--> data, target    mixup, cutmix,
normalisation ```

When the first operation is a crop (`Frame`), decoding and cropping are one step, and what lies
outside the crop is not decoded where the format allows that. Later operations work where the
image lies.

Random numbers belong to (seed, epoch, sample) and to the operation's name, so neither the worker
nor the number of workers changes an image, and adding an operation leaves the draws of the others
as they were.
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
        """The batch after this step:

        `data` (n, channels, height, width), `target` (n,) or (n, classes).
        """


class Transform:
    """From what a source stores to what a model is fed: `Transform(RandomResizedCrop(224), Flip(),
    batch=[Normalize(mean, std)])`.

    `operations` are those of `allstep.data.augment` and functions of yours: `f(image)` or
    `f(image, rng)`, uint8 array (height, width, channels) in and out. `batch` works on whole
    batches, on their device. `channels` is 3 (RGB) or 1 (grey). `shape` is needed only when a
    function of yours changes the size. Images of more than `max_pixels` are bad samples.
    """

    shape: Shape | None
    """(height, width, channels) of what comes out; None: the source's arrays keep their shape."""
    releases_gil: bool
    """False as soon as a user's function is among the operations."""
    num_classes: int | None = None
    """How many classes there are, for mixup and cutmix that were not told; what a loader's source
    knows is used else."""

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
        """All random numbers of a batch at once; row i belongs to `samples[i]`."""
        draws = Draws(seed, epoch, np.asarray(samples, dtype=np.int64))
        pairs = zip(self.operations, self._streams, strict=True)
        parameters = tuple(operation.draw(draws, stream) for operation, stream in pairs)
        return Draws(seed, epoch, draws.samples, parameters)

    def one(self, data: Any, out: Pixels, draws: Draws, row: int) -> None:
        """Writes one sample into `out` (height, width, channels).

        ValueError when `data` is not an image that can be decoded.
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
        """Writes a block of equal small images into `out` (n, height, width, channels); False,
        and `out` unused: use `one`."""
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
        """The batch after mixup, cutmix, normalisation; computed on the device where `data` is.

        `num_classes` serves mixup and cutmix where neither they nor the transform were told.
        """
        for operation, stream in zip(self.batch, self._batch_streams, strict=True):
            if getattr(operation, "num_classes", 0) is None:
                operation = operation.for_classes(self.num_classes or num_classes)  # type: ignore[attr-defined]
            data, target = operation(data, target, draws, stream)
        return data, target

    def describe(self) -> str:
        """One line for logs: the steps in their order."""
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
        """The image after decoding and, where the first operation is one, the first crop; ours to
        change."""
        if self._first is None:
            return decode(data, out.shape[2], self.max_pixels)
        into = out if out.shape[:2] == self._first.size else None
        numbers = draws.parameters[0][row]
        return cropped(data, self._first, numbers, out.shape[2], into, self.max_pixels)

    def _many(self, images: Pixels, out: Pixels, draws: Draws) -> bool:
        if images.shape == out.shape:
            out[...] = images  # so that operations may change them in place
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
    """A name for the random numbers of each operation: its own, and a count from the second of a
    kind on."""
    seen: Counter[str] = Counter()
    names = []
    for operation in operations:
        name = type(operation).__name__
        names.append(f"{name}:{seen[name]}" if seen[name] else name)
        seen[name] += 1
    return tuple(names)
