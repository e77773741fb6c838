"""One contender of `allstep bench data`: a process that reads images as fast as it can on request.

    python -m allstep.bench.data.reader NAME SETTINGS SOCKET

It connects to the bench after its first batch, and answers each request with the number of images
in that time. Before it counts, it discards the batches that its queues collected during the turns
of other contenders.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

from allstep.bench.comm.rank import serve
from allstep.bench.data.peers import PEERS, RECORDS, SMALL_PEERS, Settings
from allstep.process.family import descendants
from allstep.process.memory import proportional_nbytes

OURS, PACKED, RAW = "allstep", "allstep, packed", "allstep, raw"
FOLDERS = {OURS: RECORDS, PACKED: "packed", RAW: "raw"}
# Number of samples that is never reached.
_WITHOUT_END = 1 << 60
# Share of a turn, and minimum of batches, to discard because they were read before the turn.
_DISCARD = 0.35
_LEAST_DISCARD = 4


def operations(settings: Settings) -> tuple[Any, ...]:
    """Return the operations for images of this size.

    These are a random resized crop, or for small images a crop of the padded image; and a flip.
    """
    from allstep.data.augment import Flip, PadAndCrop, RandomResizedCrop

    size = settings.size
    return (PadAndCrop(size, 4) if size <= SMALL else RandomResizedCrop(size)), Flip()


def _allstep(settings: Settings, name: str) -> Iterator[int]:
    from allstep.data import Loader, Transform
    from allstep.data.opening import open_source

    source = open_source(str(settings.path / FOLDERS[name]))
    transform = Transform(*operations(settings))
    loader = Loader(source, transform, batch=settings.batch, seed=0, workers=settings.num_threads)
    # Continues through the ends of epochs, as tf.data's repeat().
    for batch in loader.batches(0, _WITHOUT_END):
        yield batch.weight


def _ours(name: str) -> Callable[[Settings], Iterator[int]]:
    return lambda settings: _allstep(settings, name)


def names(small: bool) -> list[str]:
    """Return the names of all contenders, in the table's order."""
    return [RAW, *SMALL_PEERS] if small else [*FOLDERS, *PEERS]


def readers(small: bool) -> Mapping[str, Callable[[Settings], Iterator[int]]]:
    """Return the generator function of each contender of `names`."""
    if small:
        return {RAW: _ours(RAW), **SMALL_PEERS}
    return {**{name: _ours(name) for name in FOLDERS}, **PEERS}


def count(batches: Iterator[int], seconds: float) -> dict[str, float]:
    """Return the number of images that arrive in about `seconds`, in whole batches."""
    start = time.perf_counter()
    for _ in islice(batches, _LEAST_DISCARD):
        pass
    while time.perf_counter() - start < _DISCARD * seconds:
        next(batches)
    images, start = 0, time.perf_counter()
    while (now := time.perf_counter()) - start < seconds or not images:
        images += next(batches)
    return {"pictures": images, "seconds": now - start}


def memory_in_use() -> int:
    """Return the bytes of this process and its descendants; shared memory counts once."""
    return proportional_nbytes([os.getpid(), *descendants(os.getpid())])


class Reader:
    """Answers the requests of the bench, as a single rank."""

    rank, size = 0, 1

    def __init__(self, name: str, settings: Settings) -> None:
        self.names = [name]
        self._before, start = memory_in_use(), time.perf_counter()
        self._batches = readers(settings.size <= SMALL)[name](settings)
        next(self._batches)
        self._first = time.perf_counter() - start

    def answer(self, order: dict[str, Any]) -> dict[str, Any]:
        """Read images for the requested seconds and return the figures."""
        counted = count(self._batches, order["seconds"])
        return {**counted, "first": self._first, "bytes": memory_in_use() - self._before}


SMALL = 64
"""Maximum height and width of small images, which are stored decoded and not resized."""


def main(name: str, settings: str, path: str) -> None:
    """Run the contender `name` until the bench closes the socket at `path`."""
    import torch

    # Imported before memory and time are measured, as in any training script.
    import allstep.data  # noqa: F401

    torch.set_num_threads(1)
    serve(path, Reader(name, Settings.from_json(settings)))
    # Workers of the peers end with this process; their own shutdown takes seconds.
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
