"""What a loader creates at its first batch and uses until it is closed: the recipe, the choice of
threads or processes, batch memory and worker processes.

```
Machinery.layout(share)   chunk size and memory of a share
Machinery.run(shares)     the same shares, filled: by the caller, by threads, or by threads of which
                          each drives one worker process
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

# Maximum number of samples in a chunk for a thread: handing out a chunk takes microseconds,
# decoding it milliseconds.
_MAX_CHUNK = 16
# Maximum number of samples in a chunk for a process. A request and its reply take 0.2 ms of this
# process's time, so there must be few of them.
_MAX_CHUNK_SENT = 64
# Minimum number of chunks per process over all shares under way: those that it was sent, and the
# next one.
_CHUNKS_PER_PROCESS = DEPTH + 1
# Seconds until processes that are stuck in a sample are ended: starting new ones takes about as
# long.
STOP_TIMEOUT = 1.0
# Bytes of images that are gathered and augmented as one block: more do not fit the cache and cause
# page faults.
_BLOCK_NBYTES = 400_000


class Machinery:
    """Recipe, workers and memory of one loader, in one process.

    `like` is some good sample, if there is one; `ahead` is the user's setting (None: 2 to 8
    shares); `pin` allocates pinned batch memory.
    """

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
        """Return chunk size and memory for shares of about `share` samples."""
        return ShareLayout(self.memory, self.image, self.dtype, self._chunk_size(share), self.like)

    def _chunk_size(self, share: int) -> int:
        """Return the number of samples of a chunk.

        A block that is augmented should fit the cache. A block that is only copied is the whole
        share. Otherwise chunks are small enough for every worker to get some of the share.
        """
        if self.recipe.blocks and self.image is not None:
            return max(1, _BLOCK_NBYTES // (math.prod(self.image) * self.dtype.itemsize))
        if self.recipe.blocks:
            return share
        if self.crew.kind == "processes":
            return self._chunk_size_sent(share)
        return max(1, min(_MAX_CHUNK, share // (2 * max(1, self.crew.count))))

    def _chunk_size_sent(self, share: int) -> int:
        """Return the chunk size for processes.

        The chunks are about equal, and as few as keep all processes busy over the shares under way.
        """
        num_samples = share * (self.ahead + 1)
        largest = max(
            1, min(_MAX_CHUNK_SENT, num_samples // (_CHUNKS_PER_PROCESS * max(1, self.crew.count)))
        )
        return -(-share // -(-share // largest)) if share else 1

    def run(self, shares: Iterator[Share]) -> Generator[tuple[Span, Filled], None, None]:
        """Yield the shares in order, filled, each with its span."""
        if not self.crew.count:
            return prefetch.fill_on_demand(shares, workers.fill_chunk)
        if self.crew.kind == "threads":
            return prefetch.fill_ahead(shares, [workers.begin_chunk] * self.crew.count, self.ahead)
        return self._run_in_processes(shares)

    def _run_in_processes(
        self, shares: Iterator[Share]
    ) -> Generator[tuple[Span, Filled], None, None]:
        """Fill the shares in worker processes.

        Idle processes of an earlier loop are reused; a loop inside a loop starts its own.
        """
        processes = next((crew for crew in self._processes if crew.free and not crew.broken), None)
        if processes is None:
            processes = Processes(self.recipe, self.crew.count)
            self._processes.append(processes)
        processes.free = False
        try:
            begins = [link.begin for link in processes.links]
            yield from prefetch.fill_ahead(
                shares, begins, self.ahead, DEPTH, processes.cancel, STOP_TIMEOUT
            )
        finally:
            processes.free = True
            if processes.broken:
                self._processes = [crew for crew in self._processes if crew is not processes]
                processes.close()

    def close(self) -> None:
        """End all worker processes."""
        for processes in self._processes:
            processes.close()
        self._processes = []


def _refuse_encoded(like: Sample | None) -> None:
    if like is not None and isinstance(like.data, bytes | bytearray | memoryview):
        raise ConfigError(
            "the samples are encoded images, and there is no transform to decode them: use"
            " Loader(source, Transform(RandomResizedCrop(224)), ...), or another transform"
        )
