"""The work on samples: read, decode, augment into batch memory. The same function runs in threads,
in worker processes and in a loop.

```
samples (numbers) --source.block + transform.many--> out, all at once       where samples are small arrays of one shape
                  --source.read, transform.one-----> out[row], one by one   everywhere else, and
                  when one of a block is bad
```

A sample that cannot be read or decoded becomes a `BadSample` in `Rows.bad`; its row in `out` is
undefined and `drop_bad` closes the gap. Without a transform nothing is decoded: arrays come as they
are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from allstep.data.augment.transform import Transform
from allstep.data.order import Numbers
from allstep.data.random.draws import Draws
from allstep.data.sources.source import BadSample, Block, Sample, Source
from allstep.errors import ConfigError, DataError

_TRIED = 8  # samples, to see whether they can be had in blocks
_LOOKED_AT = 200  # samples that are tried for one that is not bad


class Stopped(Exception):
    """Nobody wants the result any more."""


@dataclass(frozen=True)
class Recipe:
    """All that a worker must know; goes to worker processes as a pickle."""

    source: Source
    transform: Transform | None = None
    seed: int = 0
    fields: tuple[str, ...] = ()
    blocks: bool = False
    """Whether it is worth asking the source for many samples at once."""

    def draw(self, epoch: int, samples: Numbers) -> Draws | None:
        """The random numbers of some samples."""
        return self.transform.draw(self.seed, epoch, samples) if self.transform else None


@dataclass
class Rows:
    """What became of some samples, beside the images in batch memory."""

    target: NDArray[Any] | list[Any]
    data: NDArray[Any] | list[Any] | None = None
    """The arrays as they are, where there is no transform."""
    fields: dict[str, list[Any]] = field(default_factory=dict)
    bad: dict[int, BadSample] = field(default_factory=dict)
    """By row, counted from the first of these samples."""


def never() -> bool:
    """For work that nobody stops."""
    return False


def fill(
    recipe: Recipe,
    samples: Numbers,
    out: NDArray[Any] | None,
    draws: Draws | None,
    stopped: Callable[[], bool] = never,
) -> Rows:
    """Fills `out`, row i with `samples[i]` and `draws` row i.

    Raises `Stopped` soon after `stopped()` says so.
    """
    rows = _fill_block(recipe, samples, out, draws) if recipe.blocks else None
    return rows or _fill_one_by_one(recipe, samples, out, draws, stopped)


def _fill_block(
    recipe: Recipe, samples: Numbers, out: NDArray[Any] | None, draws: Draws | None
) -> Rows | None:
    block = recipe.source.block(samples)
    if block is None:
        return None
    if recipe.transform is None or out is None or draws is None:
        return Rows(target=block.target, data=block.data)
    return Rows(target=block.target) if recipe.transform.many(block.data, out, draws) else None


def _fill_one_by_one(
    recipe: Recipe,
    samples: Numbers,
    out: NDArray[Any] | None,
    draws: Draws | None,
    stopped: Callable[[], bool],
) -> Rows:
    kept: list[Any] | None = [] if out is None else None
    rows = Rows(target=[], data=kept, fields={name: [] for name in recipe.fields})
    for row, number in enumerate(samples.tolist()):
        if stopped():
            raise Stopped
        try:
            sample = recipe.source.read(number)
            if recipe.transform is not None and out is not None and draws is not None:
                recipe.transform.one(sample.data, out[row], draws, row)
            _add(rows, sample, recipe, number, kept)
        except BadSample as bad:
            rows.bad[row] = bad
        except ValueError as error:
            rows.bad[row] = BadSample(number, recipe.source.place(number), str(error))
        except Exception as error:
            error.add_note(f"while sample {number} ({recipe.source.place(number)}) was made ready")
            raise
    return rows


def _add(rows: Rows, sample: Sample, recipe: Recipe, number: int, kept: list[Any] | None) -> None:
    missing = [name for name in recipe.fields if name not in sample.fields]
    if missing:
        raise BadSample(number, recipe.source.place(number), f"it has no feature {missing[0]!r}")
    if kept is not None:
        kept.append(sample.data)
    assert isinstance(rows.target, list)
    rows.target.append(sample.target)
    for name in recipe.fields:
        rows.fields[name].append(sample.fields[name])


def drop_bad(array: NDArray[Any], bad: Sequence[int]) -> NDArray[Any]:
    """`array` without the rows in `bad`, moved together where they lie."""
    if not bad:
        return array
    keep = np.setdiff1d(np.arange(len(array)), bad)
    for to, row in enumerate(keep.tolist()):
        if to != row:
            array[to] = array[row]
    return array[: len(keep)]


def stack(values: Sequence[Any], like: Any, what: str) -> NDArray[Any]:
    """Values of samples as one array; `like`, one of them, says what no values look like."""
    if not values:
        example = np.asarray(0 if like is None else like)
        return np.empty((0, *example.shape), example.dtype)
    try:
        array = np.stack([np.asarray(value) for value in values])
    except ValueError as error:
        shapes = sorted({np.shape(value) for value in values})
        raise DataError(
            f"the {what} of a batch do not stack: they have the shapes"
            f" {', '.join(map(str, shapes[:4]))}; a transform that ends at one size, or `fields=`,"
            " which may be lists, can deliver them"
        ) from error
    if array.dtype.kind not in "biufc":
        raise DataError(
            f"the {what} are {type(values[0]).__name__}, which no tensor holds; deliver them with"
            " `fields=`"
        )
    return array


def stack_field(values: list[Any]) -> NDArray[Any] | list[Any]:
    """Values of a further feature: an array where they are numbers of one shape, else the list."""
    try:
        array = np.stack([np.asarray(value) for value in values])
    except ValueError:
        return values
    return array if array.dtype.kind in "biufc" else values


def look(source: Source, numbers: Numbers) -> Sample | None:
    """The first good one of some samples, to see what they look like; None when none is."""
    for number in numbers[:_LOOKED_AT].tolist():
        try:
            return source.read(number)
        except BadSample:
            continue
    return None


def check_fit(recipe: Recipe, like: Sample | None) -> None:
    """ConfigError when what was asked for is wrong for a sample that is good, and so, by all
    appearances, for every one."""
    if like is None:
        return
    missing = [name for name in recipe.fields if name not in like.fields]
    if missing:
        there = ", ".join(map(repr, sorted(like.fields))) or "none"
        raise ConfigError(
            f"the samples have no feature {missing[0]!r}; further features that they have: {there}"
        )
    if (
        recipe.transform is not None
        and isinstance(like.data, np.ndarray)
        and like.data.dtype != np.uint8
    ):
        raise ConfigError(
            f"a transform works on images of uint8, and the samples are {like.data.dtype} arrays"
            f" of shape {like.data.shape}: store them as uint8, or leave the transform out and"
            " change the batches yourself"
        )


def gives_blocks(source: Source, transform: Transform | None, numbers: Numbers) -> bool:
    """Whether many samples can be had at once, and made ready at once: some are tried.

    Those that are bad say nothing.
    """
    some = numbers[:: max(1, len(numbers) // _TRIED)][:_TRIED]
    good = [
        number for number in some.tolist() if isinstance(source.block(np.array([number])), Block)
    ]
    block = source.block(np.array(good)) if good else None
    if block is None or transform is None:
        return block is not None
    try:
        shape, dtype = image_shape(transform, Sample(block.data[0]))
    except ConfigError:  # it is raised again where it can be explained
        return False
    out = np.empty((len(good), *shape), dtype)
    return transform.many(block.data, out, transform.draw(0, 0, np.array(good)))


def image_shape(
    transform: Transform, like: Sample | None
) -> tuple[tuple[int, int, int], np.dtype[Any]]:
    """Shape and type of an image in batch memory."""
    if transform.shape is not None:
        return transform.shape, np.dtype(np.uint8)
    if like is None or not isinstance(like.data, np.ndarray) or like.data.ndim not in (2, 3):
        raise ConfigError(
            "the transform does not say how large its images are, and the samples are not arrays"
            " of one shape: begin it with RandomResizedCrop(224), or another crop or resize"
        )
    height, width, *channels = like.data.shape
    return (height, width, channels[0] if channels else 1), np.dtype(like.data.dtype)
