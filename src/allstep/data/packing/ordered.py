"""A map over many items by threads, whose results come in the order of the items.

Decoding, encoding and checksums let go of Python's lock, so threads use all cores, and nothing has
to be pickled. (OpenCV's own threads are switched off by `decode`.) At most `ahead` items are under
way or waiting to be taken, however slow the taker is. A taker that stops early (an error, Ctrl-C)
waits only for the items that are being worked on.
"""

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def default_jobs() -> int:
    """One thread for each core this process may use."""
    return len(os.sched_getaffinity(0))


def ordered(
    function: Callable[[Item], Result], items: Iterable[Item], jobs: int, ahead: int | None = None
) -> Generator[Result]:
    """`function` of each of `items`, by `jobs` threads; `ahead` is 4 for each thread unless given."""
    waiting: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(jobs, "allstep-data") as pool:
        try:
            for item in items:
                waiting.append(pool.submit(function, item))
                if len(waiting) >= (ahead or 4 * jobs):
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def chunks(count: int, size: int) -> Iterator[tuple[int, int]]:
    """Cuts 0..count-1 into pieces of at most `size`: (start, stop)."""
    for start in range(0, count, size):
        yield start, min(start + size, count)
