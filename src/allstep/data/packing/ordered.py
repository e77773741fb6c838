"""A parallel map with threads, whose results arrive in the order of the items.

Decoding, encoding and checksums release the GIL, so threads use all cores, and nothing has to be
pickled. (`decode` switches off OpenCV's own threads.) At most `ahead` items are in progress or
waiting for the consumer, however slow it is. A consumer that stops early (an error, Ctrl-C) waits
only for the items in progress.
"""

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def default_jobs() -> int:
    """Return the default number of threads: the cores that this process may use."""
    return len(os.sched_getaffinity(0))


def ordered(
    function: Callable[[Item], Result], items: Iterable[Item], jobs: int, ahead: int | None = None
) -> Generator[Result]:
    """Yield `function(item)` for each of `items`, in order, computed by `jobs` threads.

    `ahead` is the maximum number of items in progress or waiting (default: 4 per thread).
    """
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
    """Divide 0..count-1 into ranges of at most `size`; yield (start, stop) of each."""
    for start in range(0, count, size):
        yield start, min(start + size, count)
