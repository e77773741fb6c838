"""One rank's share of a global batch while it is filled: cut into chunks that workers fill in any
order, then assembled.

```
samples   | 0 1 2 3 4 5 6 7 | 8 9 ...        | ...      |   chunks of a few samples
workers   | thread 1        | thread 2       | thread 1 |
out       [ batch memory, a range of rows per chunk     ]   the thread that finishes the last
                                                            chunk assembles the share
```
"""

import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from allstep.data.loading import fill
from allstep.data.loading.batch_memory import Buffer, Memory
from allstep.data.loading.fill import Recipe, Rows
from allstep.data.order import Numbers, Span
from allstep.data.random.draws import Draws
from allstep.data.sources.source import BadSample, Sample


@dataclass(frozen=True)
class ShareLayout:
    """Memory, image shape and chunk size of the shares of one iteration."""

    memory: Memory
    """Pool that provides the batch memory."""
    image: tuple[int, int, int] | None
    """Height, width and channels of an image; None without a transform."""
    dtype: np.dtype[Any]
    """Type of the pixels."""
    chunk_size: int
    """Number of samples of a chunk."""
    like: Sample | None
    """Some good sample: gives shape and dtype of an empty share."""


@dataclass(frozen=True)
class Filled:
    """A complete share: data of its good samples, and its bad samples."""

    data: NDArray[Any]
    target: NDArray[Any]
    samples: Numbers
    fields: dict[str, Any]
    bad: list[BadSample]
    draws: Draws | None


class Share:
    """A share that workers fill.

    `put(chunk, rows)` is called once for each chunk; `wait` then returns the assembled share.
    """

    def __init__(self, recipe: Recipe, layout: ShareLayout, span: Span, samples: Numbers) -> None:
        self.recipe, self.layout, self.span, self.samples = recipe, layout, span, samples
        size = max(1, layout.chunk_size)
        self.chunks = [
            slice(i, min(i + size, len(samples))) for i in range(0, len(samples), size)
        ] or [slice(0, 0)]
        self.buffer: Buffer | None = None
        self.out: NDArray[Any] | None = None
        if layout.image is not None:
            self.buffer, self.out = layout.memory.take((len(samples), *layout.image), layout.dtype)
        self._rows: list[Rows | None] = [None] * len(self.chunks)
        self._missing = len(self.chunks)
        self._draws: Draws | None = None
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._filled: Filled | None = None
        self._error: BaseException | None = None

    @property
    def failed(self) -> bool:
        """Return whether a chunk failed, so that the others need not be filled."""
        return self._error is not None

    def draws(self, chunk: slice) -> Draws | None:
        """Return the random numbers of a chunk.

        The first caller draws those of the whole share at once.
        """
        with self._lock:
            if self._draws is None:
                self._draws = self.recipe.draw(self.span.epoch, self.samples)
        if self._draws is None or len(self.chunks) == 1:
            return self._draws
        return self._draws.take(np.arange(chunk.start, chunk.stop))

    def rows_of(self, chunk: slice) -> NDArray[Any] | None:
        """Return the rows of batch memory of a chunk; None without a transform."""
        return None if self.out is None else self.out[chunk]

    def put(self, chunk: slice, rows: Rows) -> None:
        """Record that `chunk` is filled; the last chunk assembles the share."""
        with self._lock:
            self._rows[self.chunks.index(chunk)] = rows
            self._missing -= 1
            last = self._missing == 0
        if last:
            self._filled = self.assemble()
            self._done.set()

    def fail(self, error: BaseException) -> None:
        """Record that a chunk could not be filled: `wait` raises the first such `error`."""
        with self._lock:
            self._error = self._error or error
        self._done.set()

    def wait(self) -> Filled:
        """Wait until the share is complete and return it; raise the error of a failed chunk."""
        self._done.wait()
        if self._error is not None:
            error, self._error = self._error, None
            try:
                raise error
            finally:
                # Its traceback refers to this frame.
                del error
        assert self._filled is not None
        return self._filled

    def assemble(self) -> Filled:
        """Return all chunks as one share, without the bad samples."""
        parts = [rows for rows in self._rows if rows is not None]
        self._rows = []
        bad = {
            chunk.start + row: bad
            for chunk, rows in zip(self.chunks, parts, strict=True)
            for row, bad in rows.bad.items()
        }
        rows = sorted(bad)
        keep = np.setdiff1d(np.arange(len(self.samples)), rows) if rows else None
        draws = self._draws
        # Worker processes drew their own random numbers; batch operations need them here.
        if draws is None and self.recipe.transform is not None:
            draws = Draws(self.recipe.seed, self.span.epoch, self.samples)
        draws = draws.take(keep) if draws is not None and keep is not None else draws
        names = self.recipe.fields
        filled = Filled(
            data=self._data(parts, rows),
            target=self._target(parts),
            samples=self.samples if keep is None else self.samples[keep],
            fields={
                name: fill.stack_field([value for part in parts for value in part.fields[name]])
                for name in names
            },
            bad=[bad[row] for row in rows],
            draws=draws,
        )
        # From here on only the batch refers to its memory.
        self.out = None
        return filled

    def _data(self, parts: list[Rows], bad: list[int]) -> NDArray[Any]:
        if self.out is not None:
            return fill.drop_bad(self.out, bad)
        if len(parts) == 1 and isinstance(parts[0].data, np.ndarray):
            return parts[0].data
        values = [value for part in parts for value in (part.data if part.data is not None else ())]
        if self.layout.like is not None and self.layout.like.data is None:
            return np.empty((len(values), 0), np.uint8)
        return fill.stack(values, self.layout.like and self.layout.like.data, "samples")

    def _target(self, parts: list[Rows]) -> NDArray[Any]:
        if all(isinstance(part.target, np.ndarray) for part in parts):
            return np.concatenate([part.target for part in parts])
        values = [value for part in parts for value in part.target]
        return fill.stack(values, self.layout.like and self.layout.like.target, "targets")
