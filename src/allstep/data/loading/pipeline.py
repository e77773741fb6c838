"""What a loader makes ready at its first batch and uses until its end: the recipe, who works on it,
memory, and worker processes.

```
Machinery.layout(share)   how a share is cut up and where it lies
Machinery.run(shares)     the same shares, filled: in the caller's own time, by threads, or by threads that drive processes
```
"""

import math
import os
from collections.abc import Generator, Iterator

import numpy as np

from allstep.data.loading import fill, prefetch, workers
from allstep.data.loading.fill import Recipe
from allstep.data.loading.memory import Buffer, Memory, PinnedBuffer, SharedBuffer
from allstep.data.loading.processes import DEPTH, Processes
from allstep.data.loading.share import Filled, Share, ShareLayout
from allstep.data.loading.workers import Crew
from allstep.data.order import Span
from allstep.data.sources.source import Sample
from allstep.errors import ConfigError

# Samples handed to a thread at once, at most: microseconds of handing out against milliseconds of
# decoding.
_PIECE = 16
# The same for a process. A question and its answer take 0.2 ms of this process's time, so they must
# be few.
_PIECE_SENT = 64
# Pieces that there should be for each process when all shares are under way: those it was sent, and
# one to follow.
_PIECES_EACH = DEPTH + 1
# seconds until processes that are stuck in a sample are ended: starting others takes about as long
PATIENCE = 1.0
# bytes of the images that are gathered and augmented at once: more leave the cache and fault in
# fresh pages
_BLOCK = 400_000


class Machinery:
    """`like` is some sample, `ahead` as the user gave it, and memory is pinned with `pin`."""

    def __init__(
        self, recipe: Recipe, crew: Crew, like: Sample | None, ahead: int | None, *, pin: bool
    ) -> None:
        self.pid = os.getpid()
        self.recipe, self.crew, self.like = recipe, crew, like
        self.ahead = ahead or max(2, min(8, crew.count + 1 if recipe.blocks else 3))
        self._processes: list[Processes] = []
        shared = crew.kind == "processes" and crew.count > 0
        make: type[Buffer] = SharedBuffer if shared else PinnedBuffer if pin else Buffer
        self.memory = Memory(self.ahead + 2, make)
        self.image: tuple[int, int, int] | None = None
        self.dtype = np.dtype(np.uint8)
        if recipe.transform is not None:
            self.image, self.dtype = fill.image_shape(recipe.transform, like)
        else:
            _refuse_encoded(like)

    def layout(self, share: int) -> ShareLayout:
        """For shares of about `share` samples."""
        return ShareLayout(self.memory, self.image, self.dtype, self._piece(share), self.like)

    def _piece(self, share: int) -> int:
        """Samples of a piece: blocks that fit the cache; all, where arrays are only copied; else
        few, for all workers to have some."""
        if self.recipe.blocks and self.image is not None:
            return max(1, _BLOCK // (math.prod(self.image) * self.dtype.itemsize))
        if self.recipe.blocks:
            return share
        if self.crew.kind == "processes":
            return self._piece_sent(share)
        return max(1, min(_PIECE, share // (2 * max(1, self.crew.count))))

    def _piece_sent(self, share: int) -> int:
        """As few pieces as keep all processes busy over the shares under way, all of about one
        size."""
        num_samples = share * (self.ahead + 1)
        largest = max(1, min(_PIECE_SENT, num_samples // (_PIECES_EACH * max(1, self.crew.count))))
        return -(-share // -(-share // largest)) if share else 1

    def run(self, shares: Iterator[Share]) -> Generator[tuple[Span, Filled], None, None]:
        """The shares, filled."""
        if not self.crew.count:
            return prefetch.one_after_the_other(shares, workers.work_here)
        if self.crew.kind == "threads":
            return prefetch.ahead_of_time(
                shares, [workers.begin_here] * self.crew.count, self.ahead
            )
        return self._run_in_processes(shares)

    def _run_in_processes(
        self, shares: Iterator[Share]
    ) -> Generator[tuple[Span, Filled], None, None]:
        """By processes of an earlier loop that are free; a loop inside a loop has its own."""
        processes = next((crew for crew in self._processes if crew.free and not crew.broken), None)
        if processes is None:
            processes = Processes(self.recipe, self.crew.count)
            self._processes.append(processes)
        processes.free = False
        try:
            begins = [link.begin for link in processes.links]
            yield from prefetch.ahead_of_time(
                shares, begins, self.ahead, DEPTH, processes.cancel, PATIENCE
            )
        finally:
            processes.free = True
            if processes.broken:
                self._processes = [crew for crew in self._processes if crew is not processes]
                processes.close()

    def close(self) -> None:
        """Ends all processes."""
        for processes in self._processes:
            processes.close()
        self._processes = []


def _refuse_encoded(like: Sample | None) -> None:
    if like is not None and isinstance(like.data, bytes | bytearray | memoryview):
        raise ConfigError(
            "the samples are encoded images, and nothing says how to make arrays of them: "
            "Loader(source, Transform(RandomResizedCrop(224)), ...), or another transform"
        )
