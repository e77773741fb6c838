"""Read, decode and augment samples into batch memory.

Threads, worker processes and the caller's own loop all run the same function, `fill`:

```
sample numbers --source.block, transform.many--> out, as one block      small arrays of one shape
               --source.read, transform.one----> out[row], one by one   all other samples, and
                                                                        blocks with a bad sample
```

A sample that cannot be read or decoded becomes a `BadSample` in `Rows.bad`. Its row in `out` is
undefined; `drop_bad` removes it. Without a transform nothing is decoded: arrays stay as the source
returns them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from allstep import faults
from allstep.data.augment.transform import Transform
from allstep.data.loading.read_record import read_record
from allstep.data.order import Numbers
from allstep.data.random.draws import Draws
from allstep.data.sources.source import BadSample, Block, Sample, Source
from allstep.errors import ConfigError, DataError

# Samples with which `gives_blocks` tries whether the source and the transform work in blocks.
_BLOCK_TRIALS = 8
# Samples that `look` reads at most until it finds a good one.
_MAX_LOOKED_AT = 200


class Stopped(Exception):
    """Raised by work on samples when its result is no longer needed."""


@dataclass(frozen=True)
class Recipe:
    """Everything that a worker needs to fill batches; pickled for worker processes."""

    source: Source
    transform: Transform | None = None
    """Transform of the images; None leaves the source's arrays as they are."""
    seed: int = 0
    """Key of the transform's random numbers."""
    fields: tuple[str, ...] = ()
    """Names of further features to return with each sample."""
    blocks: bool = False
    """Whether to request many samples at once from the source (see `gives_blocks`)."""

    def draw(self, epoch: int, samples: Numbers) -> Draws | None:
        """Return the random numbers of `samples` in `epoch`; None without a transform."""
        return self.transform.draw(self.seed, epoch, samples) if self.transform else None


@dataclass
class Rows:
    """The results for some samples, except the images, which are in batch memory."""

    target: NDArray[Any] | list[Any]
    """Targets of the good samples."""
    data: NDArray[Any] | list[Any] | None = None
    """The source's arrays if there is no transform, otherwise None."""
    fields: dict[str, list[Any]] = field(default_factory=dict)
    """Values of the further features of the good samples, by name."""
    bad: dict[int, BadSample] = field(default_factory=dict)
    """Bad samples by row, where row 0 is the first of these samples."""


def never() -> bool:
    """Return False: the default `stopped` function, for work that is never stopped."""
    return False


def fill(
    recipe: Recipe,
    samples: Numbers,
    out: NDArray[Any] | None,
    draws: Draws | None,
    stopped: Callable[[], bool] = never,
) -> Rows:
    """Fill row i of `out` with `samples[i]`, transformed with row i of `draws`; return the rest.

    `stopped` is called between two samples; `Stopped` is raised once it returns True.
    """
    is_damaged = faults.active is not None and faults.active.corrupts(samples.tolist())
    in_block = recipe.blocks and not is_damaged
    rows = _fill_block(recipe, samples, out, draws) if in_block else None
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
            if faults.active is None:
                sample = recipe.source.read(number)
            else:
                sample = read_record(recipe.source, number, faults.active)
            if recipe.transform is not None and out is not None and draws is not None:
                recipe.transform.one(sample.data, out[row], draws, row)
            _add(rows, sample, recipe, number, kept)
        except BadSample as bad:
            rows.bad[row] = bad
        except ValueError as error:
            rows.bad[row] = BadSample(number, recipe.source.place(number), str(error))
        except Exception as error:
            error.add_note(f"while preparing sample {number} ({recipe.source.place(number)})")
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
    """Return `array` without the rows in `bad`; later rows move up in place."""
    if not bad:
        return array
    keep = np.setdiff1d(np.arange(len(array)), bad)
    for to, row in enumerate(keep.tolist()):
        if to != row:
            array[to] = array[row]
    return array[: len(keep)]


def stack(values: Sequence[Any], like: Any, what: str) -> NDArray[Any]:
    """Return the values of samples as one array.

    `like` is one such value: the shape and dtype of the result if `values` is empty. `what` names
    the values in error messages.
    """
    if not values:
        example = np.asarray(0 if like is None else like)
        return np.empty((0, *example.shape), example.dtype)
    try:
        array = np.stack([np.asarray(value) for value in values])
    except ValueError as error:
        shapes = sorted({np.shape(value) for value in values})
        raise DataError(
            f"the {what} of a batch do not stack: they have the shapes"
            f" {', '.join(map(str, shapes[:4]))}; use a transform with one output size, or request"
            " them with `fields=`, which returns lists"
        ) from error
    if array.dtype.kind not in "biufc":
        raise DataError(
            f"the {what} are {type(values[0]).__name__}, which cannot become a tensor; request them"
            " with `fields=`"
        )
    return array


def stack_field(values: list[Any]) -> NDArray[Any] | list[Any]:
    """Return an array if the values are numbers of one shape, otherwise `values` itself."""
    try:
        array = np.stack([np.asarray(value) for value in values])
    except ValueError:
        return values
    return array if array.dtype.kind in "biufc" else values


def look(source: Source, numbers: Numbers) -> Sample | None:
    """Return the first good sample, as an example of all; None if the first 200 are bad."""
    for number in numbers[:_MAX_LOOKED_AT].tolist():
        try:
            return source.read(number)
        except BadSample:
            continue
    return None


def check_fit(recipe: Recipe, like: Sample | None) -> None:
    """Raise ConfigError if the recipe does not fit the good sample `like`.

    What does not fit one good sample most probably fits none; without this check every sample
    would be reported as bad.
    """
    if like is None:
        return
    missing = [name for name in recipe.fields if name not in like.fields]
    if missing:
        there = ", ".join(map(repr, sorted(like.fields))) or "none"
        raise ConfigError(
            f"the samples have no feature {missing[0]!r}; available further features: {there}"
        )
    if (
        recipe.transform is not None
        and isinstance(like.data, np.ndarray)
        and like.data.dtype != np.uint8
    ):
        raise ConfigError(
            f"a transform expects images of uint8, found {like.data.dtype} arrays of shape"
            f" {like.data.shape}: store them as uint8, or omit the transform and process the"
            " batches in the training script"
        )


def gives_blocks(source: Source, transform: Transform | None, numbers: Numbers) -> bool:
    """Return whether the source reads, and the transform processes, many samples at once.

    Tries up to 8 samples, spread over `numbers`; bad ones are ignored.
    """
    some = numbers[:: max(1, len(numbers) // _BLOCK_TRIALS)][:_BLOCK_TRIALS]
    good = [
        number for number in some.tolist() if isinstance(source.block(np.array([number])), Block)
    ]
    block = source.block(np.array(good)) if good else None
    if block is None or transform is None:
        return block is not None
    try:
        shape, dtype = image_shape(transform, Sample(block.data[0]))
    except ConfigError:
        # `image_shape` raises it again when the loader starts.
        return False
    out = np.empty((len(good), *shape), dtype)
    return transform.many(block.data, out, transform.draw(0, 0, np.array(good)))


def image_shape(
    transform: Transform, like: Sample | None
) -> tuple[tuple[int, int, int], np.dtype[Any]]:
    """Return shape (height, width, channels) and dtype of an image in batch memory."""
    if transform.shape is not None:
        return transform.shape, np.dtype(np.uint8)
    if like is None or not isinstance(like.data, np.ndarray) or like.data.ndim not in (2, 3):
        raise ConfigError(
            "the transform does not set the size of its images, and the samples are not arrays"
            " of one shape: start it with RandomResizedCrop(224), or another crop or resize"
        )
    height, width, *channels = like.data.shape
    return (height, width, channels[0] if channels else 1), np.dtype(like.data.dtype)
