"""One contender of `allstep bench data`: a process that reads images as fast as it can, when it is
told to.

    python -m allstep.bench.data.reader NAME SETTINGS SOCKET

It calls the bench through the socket when its first batch is there, and answers each word with how
many images came in that time. Before it counts, it throws away what its queues had gathered while
others had their turn.
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
_WITHOUT_END = 1 << 60  # samples
_DISCARD = 0.35  # of a turn, for what was gathered before it
_LEAST_DISCARD = 4  # batches


def operations(settings: Settings) -> tuple[Any, ...]:
    """What is done to images of this size: a random resized crop, or a crop of the padded
    image; and a flip."""
    from allstep.data.augment import Flip, PadAndCrop, RandomResizedCrop

    size = settings.size
    return (PadAndCrop(size, 4) if size <= SMALL else RandomResizedCrop(size)), Flip()


def _allstep(settings: Settings, name: str) -> Iterator[int]:
    from allstep.data import Loader, Transform
    from allstep.data.opening import open_source

    source = open_source(str(settings.path / FOLDERS[name]))
    loader = Loader(
        source,
        Transform(*operations(settings)),
        batch=settings.batch,
        seed=0,
        workers=settings.num_threads,
    )
    for batch in loader.batches(
        0, _WITHOUT_END
    ):  # through the ends of epochs, as tf.data's repeat()
        yield batch.weight


def _ours(name: str) -> Callable[[Settings], Iterator[int]]:
    return lambda settings: _allstep(settings, name)


def names(small: bool) -> list[str]:
    """Everybody, in the table's order."""
    return [RAW, *SMALL_PEERS] if small else [*FOLDERS, *PEERS]


def readers(small: bool) -> Mapping[str, Callable[[Settings], Iterator[int]]]:
    """How each of `names` reads."""
    if small:
        return {RAW: _ours(RAW), **SMALL_PEERS}
    return {**{name: _ours(name) for name in FOLDERS}, **PEERS}


def count(batches: Iterator[int], seconds: float) -> dict[str, float]:
    """How many images come in about `seconds`, whole batches only."""
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
    """Bytes of this process and of those it started; what they share counts once."""
    return proportional_nbytes([os.getpid(), *descendants(os.getpid())])


class Reader:
    """What the bench talks to: a rank of one."""

    rank, size = 0, 1

    def __init__(self, name: str, settings: Settings) -> None:
        self.names = [name]
        self._before, start = memory_in_use(), time.perf_counter()
        self._batches = readers(settings.size <= SMALL)[name](settings)
        next(self._batches)
        self._first = time.perf_counter() - start

    def answer(self, word: dict[str, Any]) -> dict[str, Any]:
        counted = count(self._batches, word["seconds"])
        return {**counted, "first": self._first, "bytes": memory_in_use() - self._before}


SMALL = 64
"""Pixels of a side up to which images are small: kept decoded, and cropped without being resized.
"""


def main(name: str, settings: str, path: str) -> None:
    import torch

    import allstep.data  # noqa: F401  # imported before memory and time are looked at, as in any training script

    torch.set_num_threads(1)
    serve(path, Reader(name, Settings.from_json(settings)))
    os._exit(0)  # workers of the peers end with us; their own teardown takes seconds


if __name__ == "__main__":
    main(*sys.argv[1:])
