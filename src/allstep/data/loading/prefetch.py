"""Fill shares ahead of the consumer: threads fill the chunks of the next shares, in the order of
consumption.

```
consumer    next() --adds--> shares under way: at most `ahead` beyond the one in use
               ^                   | chunks       (back-pressure: no more are started)
               |                   v
            wait for the      queue of chunks --> thread 0, 1, ... --> work(share, chunk)
            oldest share <-----------------------------------'
```

A thread fills a chunk itself, or sends it to its worker process and waits; the argument `begins`
decides which. Waiting costs no CPU time: the queue and the events block in the kernel without the
GIL. A process is sent up to `depth` chunks: a sleeping thread takes 0.1 to 0.2 ms to wake on a
virtual machine, and meanwhile the process works on the next chunk. Threads live as long as one
iteration, however it ends: by its last batch, `break`, an exception, Ctrl-C or garbage collection.
Each thread checks between two samples whether it should stop.

The error of a share is raised in its turn, after the preceding batches were delivered.
"""

import atexit
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue

from allstep.data.loading.fill import Rows, Stopped
from allstep.data.loading.share import Filled, Share
from allstep.data.order import Span
from allstep.errors import AllstepError

# Seconds to wait for a thread to notice the end of the iteration: enough for one sample.
STOP_TIMEOUT = 5.0
Work = Callable[[Share, slice, "Stop"], Rows]
Finish = Callable[[], Rows]
Begin = Callable[[Share, slice, "Stop"], Finish]
"""Function that starts work on a chunk. It returns a function, called once, that waits for it."""


class Stop:
    """Flag that an iteration has ended; calling it returns the flag."""

    def __init__(self) -> None:
        self.now = False

    def __call__(self) -> bool:
        return self.now


def fill_on_demand(
    shares: Iterator[Share], work: Work
) -> Generator[tuple[Span, Filled], None, None]:
    """Yield the shares in order, each filled without threads when it is requested."""
    stop = Stop()
    for share in shares:
        for chunk in share.chunks:
            share.put(chunk, work(share, chunk, stop))
        yield share.span, share.wait()


def fill_ahead(
    shares: Iterator[Share],
    begins: Sequence[Begin],
    ahead: int,
    depth: int = 1,
    on_stop: Callable[[], None] = lambda: None,
    timeout: float | None = None,
) -> Generator[tuple[Span, Filled], None, None]:
    """Yield the shares in order, filled by one thread for each function in `begins`.

    At most `ahead` shares beyond the one in use are under way; a thread has at most `depth` chunks
    under way. At the end, `on_stop` is called, and then the threads are joined for at most
    `timeout` seconds in total (default: `STOP_TIMEOUT`).
    """
    crew = _Crew(begins, depth, on_stop, STOP_TIMEOUT if timeout is None else timeout)
    under_way: deque[Share] = deque()
    try:
        while True:
            crew.check_process()
            while len(under_way) <= ahead and (share := next(shares, None)) is not None:
                under_way.append(share)
                crew.give(share)
            if not under_way:
                return
            share = under_way.popleft()
            filled = share.wait()
            span = share.span
            del share
            yield span, filled
            # Otherwise its memory could not be reused for the batch after the next.
            del filled
    finally:
        crew.close()


class _Crew:
    """The threads of one iteration."""

    def __init__(
        self, begins: Sequence[Begin], depth: int, on_stop: Callable[[], None], timeout: float
    ) -> None:
        self._pid, self._timeout = os.getpid(), timeout
        self._stop, self._on_stop = Stop(), on_stop
        self._queue: SimpleQueue[tuple[Share, slice] | None] = SimpleQueue()
        self._threads = [
            threading.Thread(
                target=_run,
                args=(self._queue, begin, self._stop, depth),
                name=f"allstep-loader-{i}",
                daemon=True,
            )
            for i, begin in enumerate(begins)
        ]
        for thread in self._threads:
            thread.start()
        _CREWS.add(self)

    def give(self, share: Share) -> None:
        """Queue the chunks of `share` behind those of earlier shares."""
        for chunk in share.chunks:
            self._queue.put((share, chunk))

    def check_process(self) -> None:
        """Raise AllstepError in a forked process: it has a copy of this object, but no threads."""
        if os.getpid() != self._pid:
            raise AllstepError(
                f"this iteration over a loader belongs to process {self._pid}, of which this"
                f" process ({os.getpid()}) is a fork: start a new `for batch in loader` here"
            )

    def close(self) -> None:
        """End all threads; wait for them until the timeout."""
        if os.getpid() != self._pid or self._stop.now:
            return
        self._stop.now = True
        _drain(self._queue)
        for _ in self._threads:
            self._queue.put(None)
        self._on_stop()
        limit = time.monotonic() + self._timeout
        for thread in self._threads:
            # The garbage collector may call this in one of these threads.
            if thread is not threading.current_thread():
                thread.join(max(0.0, limit - time.monotonic()))
        _CREWS.discard(self)


def _run(
    queue: "SimpleQueue[tuple[Share, slice] | None]", begin: Begin, stop: Stop, depth: int
) -> None:
    """Start chunks until `depth` are under way or the queue is empty, then finish the oldest."""
    begun: deque[tuple[Share, slice, Finish]] = deque()
    over = False
    while begun or not over:
        item = None
        if not over and len(begun) < depth:
            with suppress(Empty):
                item = queue.get(block=not begun)
                over = item is None
        if item is not None:
            _begin(*item, begin, stop, begun)
        elif begun:
            _finish(*begun.popleft())
        # While this thread waits for the next chunk, it must not hold the memory of the last one.
        del item


def _begin(
    share: Share,
    chunk: slice,
    begin: Begin,
    stop: Stop,
    begun: deque[tuple[Share, slice, Finish]],
) -> None:
    try:
        if not share.failed:
            begun.append((share, chunk, begin(share, chunk, stop)))
    except Stopped:
        pass
    except BaseException as error:
        share.fail(error)


def _finish(share: Share, chunk: slice, finish: Finish) -> None:
    try:
        share.put(chunk, finish())
    except Stopped:
        pass
    except BaseException as error:
        share.fail(error)


def _drain(queue: "SimpleQueue[tuple[Share, slice] | None]") -> None:
    try:
        while True:
            queue.get_nowait()
    except Empty:
        pass


_CREWS: "weakref.WeakSet[_Crew]" = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """End all threads at exit: one that decodes during interpreter shutdown could crash it."""
    for crew in list(_CREWS):
        crew.close()
