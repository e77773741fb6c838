"""Horovod's loader classes: `_iterate` yields the batches of an epoch, a mixin prefetches them.

    class MyLoader(AsyncDataLoaderMixin, BaseDataLoader):
        def _iterate(self): ...

The mixin's thread continues with the next epoch by itself. A queue holds the prefetched items:
batches, None at the end of each epoch, or an exception, which is raised in place of the batch.
`close_async_loader()` ends the thread at any time.
"""

import contextlib
import queue
import threading
from collections.abc import Iterator
from typing import Any

# Interval at which a thread that waits for the queue checks whether it should end.
_POLL_SECONDS = 0.1


class BaseDataLoader:
    """A loader that yields the batches of `_iterate`, each passed through `_process_batch`."""

    def __len__(self) -> int:
        raise NotImplementedError(f"{type(self).__name__} does not define __len__()")

    def _iterate(self) -> Iterator[Any]:
        raise NotImplementedError(
            f"{type(self).__name__} needs _iterate(), the batches of one epoch"
        )

    def _process_batch(self, batch: Any) -> Any:
        """Return the batch as the consumer needs it, such as on a GPU; runs in its thread."""
        return batch

    def __iter__(self) -> Iterator[Any]:
        for batch in self._iterate():
            yield self._process_batch(batch)


class AsyncDataLoaderMixin(BaseDataLoader):
    """A mixin that prefetches the batches of a loader in a thread; list it before the loader.

    async_loader_queue_size: number of batches to prefetch (default 64); 0 for no thread.
    debug_data_loader: stored for compatibility with Horovod, without effect.
    """

    def __init__(
        self,
        async_loader_queue_size: int = 64,
        debug_data_loader: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        self.async_loader_queue_size = async_loader_queue_size
        self.debug_data_loader = debug_data_loader
        super().__init__(*args, **kwargs)
        self.queue: queue.Queue[Any] = queue.Queue(max(async_loader_queue_size, 1))
        self.finished_event = threading.Event()
        self.thread: threading.Thread | None = None

    def __iter__(self) -> Iterator[Any]:
        if self.async_loader_queue_size == 0:
            yield from super().__iter__()
            return
        if self.thread is None:
            self.finished_event.clear()
            self.thread = threading.Thread(target=self._work_ahead, daemon=True)
            self.thread.start()
        while (batch := self._next()) is not None:
            if isinstance(batch, Exception):
                self.close_async_loader()
                raise batch
            yield self._process_batch(batch)

    def close_async_loader(self) -> None:
        """End the thread and drop its prefetched batches; the next loop starts a new thread."""
        self.finished_event.set()
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        with contextlib.suppress(queue.Empty):
            while True:
                self.queue.get_nowait()

    def _next(self) -> Any:
        """Return the next item of the queue; also None if the loader was closed meanwhile."""
        while not self.finished_event.is_set():
            with contextlib.suppress(queue.Empty):
                return self.queue.get(timeout=_POLL_SECONDS)
        return None

    def _work_ahead(self) -> None:
        """Put the batches of all epochs into the queue, until the loader is closed."""
        try:
            while not self.finished_event.is_set():
                for batch in self._iterate():
                    if not self._put(batch):
                        return
                self._put(None)
        except Exception as error:
            self._put(error)

    def _put(self, item: Any) -> bool:
        """Put an item into the queue; return False if the loader was closed before."""
        while not self.finished_event.is_set():
            with contextlib.suppress(queue.Full):
                self.queue.put(item, timeout=_POLL_SECONDS)
                return True
        return False
