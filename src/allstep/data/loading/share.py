"""One rank's share of a global batch on its way: cut into chunks that workers fill in any order,
then put together.

```
samples   | 0 1 2 3 4 5 6 7 | 8 9 ...        | ...      |     chunks: few samples each, so that handing one out costs little
workers   | thread 1        | thread 2       | thread 1 |
out       [ rows in batch memory, each chunk its own    ]     whoever finishes the last chunk puts the share together
```
"""

import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from allstep.data.loading import fill
from allstep.data.loading.fill import Recipe, Rows
from allstep.data.loading.memory import Buffer, Memory
from allstep.data.order import Numbers, Span
from allstep.data.random.draws import Draws
from allstep.data.sources.source import BadSample, Sample


@dataclass(frozen=True)
class ShareLayout:
    """How shares lie in memory."""

    memory: Memory
    image: tuple[int, int, int] | None
    """Height, width, channels; None without a transform."""
    dtype: np.dtype[Any]
    piece: int
    """Samples of a chunk."""
    like: Sample | None
    """Some sample, which says what an empty share looks like."""


@dataclass(frozen=True)
class Filled:
    """A share that is ready: its good samples and the bad ones."""

    data: NDArray[Any]
    target: NDArray[Any]
    samples: Numbers
    fields: dict[str, Any]
    bad: list[BadSample]
    draws: Draws | None


class Share:
    """Chunks are filled by `put(chunk, rows)`, once each; `wait` then gives what `assemble` made of
    them."""

    def __init__(self, recipe: Recipe, layout: ShareLayout, span: Span, samples: Numbers) -> None:
        self.recipe, self.layout, self.span, self.samples = recipe, layout, span, samples
        size = max(1, layout.piece)
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
        """Whether a chunk of it failed, so that the others are not needed."""
        return self._error is not None

    def draws(self, chunk: slice) -> Draws | None:
        """The random numbers of a chunk; those of the whole share are drawn together, by whoever
        comes first."""
        with self._lock:
            if self._draws is None:
                self._draws = self.recipe.draw(self.span.epoch, self.samples)
        if self._draws is None or len(self.chunks) == 1:
            return self._draws
        return self._draws.take(np.arange(chunk.start, chunk.stop))

    def rows_of(self, chunk: slice) -> NDArray[Any] | None:
        """The batch memory of a chunk."""
        return None if self.out is None else self.out[chunk]

    def put(self, chunk: slice, rows: Rows) -> None:
        """The chunk is filled."""
        with self._lock:
            self._rows[self.chunks.index(chunk)] = rows
            self._missing -= 1
            last = self._missing == 0
        if last:
            self._filled = self.assemble()
            self._done.set()

    def fail(self, error: BaseException) -> None:
        """A chunk could not be filled: whoever waits gets `error`, the first of them."""
        with self._lock:
            self._error = self._error or error
        self._done.set()

    def wait(self) -> Filled:
        """The share when it is ready."""
        self._done.wait()
        if self._error is not None:
            error, self._error = self._error, None
            try:
                raise error
            finally:
                del error  # its traceback holds this frame
        assert self._filled is not None
        return self._filled

    def assemble(self) -> Filled:
        """All chunks as one, without what is bad."""
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
        if (
            draws is None and self.recipe.transform is not None
        ):  # worker processes drew their own; the batch part needs some here
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
        self.out = None  # now only the batch holds its memory
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
