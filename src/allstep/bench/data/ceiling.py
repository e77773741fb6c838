"""The ceiling in `allstep bench data`: the speed of the loader's workers without a loader.

```
loader           plan -> micro-batches -> queue or socket -> read, decode, crop, flip -> assemble
plain threads                                                the same work, counted only
plain processes                                              the same, one interpreter each
```

Each of N workers repeatedly fills its own batch memory with its share of a shuffled epoch. The work
is `loading.fill`; the memory is of the same kind as the loader's, reused, and touched before timing
starts. Threads share the GIL, so they can be slower than processes; both are measured. Neither is N
times as fast as one thread: cores share memory, caches and, on many machines, clock and arithmetic
units.
"""

import multiprocessing
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from allstep.bench.comm.rank import serve
from allstep.bench.data.peers import Settings
from allstep.bench.data.reader import FOLDERS, operations
from allstep.data.augment.transform import Transform
from allstep.data.loading import fill
from allstep.data.loading.batch_memory import Buffer, SharedBuffer
from allstep.data.loading.fill import Recipe
from allstep.data.loading.pipeline import Machinery
from allstep.data.loading.workers import Crew
from allstep.data.opening import open_source

Kind = Literal["threads", "processes"]
KINDS: tuple[Kind, ...] = ("threads", "processes")
# Timeout, so that a worker that fails before the start does not block the others forever.
_SECONDS_TO_START = 60.0
# Batches that the loader has in memory: prefetched ones, the one in use and the one being filled.
_NUM_BUFFERS = 5


def recipe_of(settings: Settings, name: str) -> Recipe:
    """Return the work of one of allstep's contenders."""
    source = open_source(str(settings.path / FOLDERS[name]))
    transform = Transform(*operations(settings))
    blocks = fill.gives_blocks(source, transform, np.arange(len(source)))
    return Recipe(source, transform, blocks=blocks)


class Plain:
    """One worker: fills its part of each batch, in memory that it reuses."""

    def __init__(
        self, recipe: Recipe, batch: int, rank: int, size: int, make: type[Buffer]
    ) -> None:
        self.recipe, self.rank, self.size = recipe, rank, size
        shape, dtype = fill.image_shape(
            self._transform, fill.look(recipe.source, np.arange(len(recipe.source)))
        )
        self.micro_batch = _micro_batch(recipe, batch, size)
        nbytes = self.micro_batch * int(np.prod(shape)) * dtype.itemsize
        self._buffers = [make(nbytes) for _ in range(_NUM_BUFFERS)]
        self._outs = [
            np.frombuffer(memoryview(each.raw), dtype, nbytes // dtype.itemsize).reshape(
                self.micro_batch, *shape
            )
            for each in self._buffers
        ]
        for out in self._outs:
            out[...] = 0

    @property
    def _transform(self) -> Transform:
        assert self.recipe.transform is not None
        return self.recipe.transform

    def speed(self, seconds: float) -> float:
        """Return images per second, over the whole micro-batches of about `seconds`."""
        start = now = time.perf_counter()
        number = done = 0
        while now < start + seconds:
            done += self._fill(number)
            number, now = number + 1, time.perf_counter()
        return done / (now - start)

    def _fill(self, number: int) -> int:
        """Fill micro-batch `number` of this worker and return its number of samples."""
        per_epoch = max(1, len(self.recipe.source) // (self.micro_batch * self.size))
        epoch, place = divmod(number, per_epoch)
        order = np.random.default_rng(epoch).permutation(len(self.recipe.source))
        samples = order[(place * self.size + self.rank) * self.micro_batch :][: self.micro_batch]
        out = self._outs[number % _NUM_BUFFERS][: len(samples)]
        fill.fill(self.recipe, samples, out, self.recipe.draw(epoch, samples))
        return len(samples)


def _micro_batch(recipe: Recipe, batch: int, size: int) -> int:
    """Return the samples to fill at once, as in the loader.

    Blocks of small images must fit into the cache.
    """
    like = fill.look(recipe.source, np.arange(len(recipe.source)))
    machinery = Machinery(recipe, Crew(size, "processes", "as asked"), like, None, pin=False)
    return min(machinery.layout(batch).chunk_size, max(1, batch // size))


def speed_of_threads(recipe: Recipe, settings: Settings, seconds: float) -> float:
    """Return images per second of all plain threads together."""
    speeds = [0.0] * settings.num_threads
    barrier = threading.Barrier(settings.num_threads)

    def run(rank: int) -> None:
        worker = Plain(recipe, settings.batch, rank, settings.num_threads, Buffer)
        barrier.wait(_SECONDS_TO_START)
        speeds[rank] = worker.speed(seconds)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(settings.num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(speeds)


def speed_of_processes(recipe: Recipe, settings: Settings, seconds: float) -> float:
    """Return images per second of all plain processes together."""
    context = multiprocessing.get_context("fork")
    barrier, speeds = context.Barrier(settings.num_threads), context.SimpleQueue()

    def run(rank: int) -> None:
        worker = Plain(recipe, settings.batch, rank, settings.num_threads, SharedBuffer)
        barrier.wait(_SECONDS_TO_START)
        speeds.put(worker.speed(seconds))

    processes = [
        context.Process(target=run, args=(rank,), daemon=True)
        for rank in range(settings.num_threads)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        if process.exitcode:
            raise ChildProcessError(
                f"a plain process of the benchmark ended with status {process.exitcode}"
            )
    return sum(float(speeds.get()) for _ in processes)


_SPEEDS: dict[Kind, Callable[[Recipe, Settings, float], float]] = {
    "threads": speed_of_threads,
    "processes": speed_of_processes,
}


class Alone:
    """Answers the requests of the bench, as `reader.Reader`: runs plain threads, then processes."""

    rank, size = 0, 1

    def __init__(self, name: str, settings: Settings) -> None:
        self.names = [name]
        self._settings, self._recipe = settings, recipe_of(settings, name)

    def answer(self, order: dict[str, Any]) -> dict[str, Any]:
        """Return images per second for each kind of workers."""
        seconds = order["seconds"] / len(KINDS)
        return {kind: _SPEEDS[kind](self._recipe, self._settings, seconds) for kind in KINDS}


if __name__ == "__main__":
    form, text, path = sys.argv[1:]
    serve(path, Alone(form, Settings.from_json(text)))
