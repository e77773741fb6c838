"""A loader is a class with `_iterate`, the batches of one epoch. The mixin in front of it fetches
them in a thread.

    class MyLoader(AsyncDataLoaderMixin, BaseDataLoader):
        def _iterate(self): ...

The thread goes on with the next epoch by itself; a queue holds what it has fetched: batches, None
at the end of each epoch, and an exception, raised where the batch would have come.
`close_async_loader()` ends it at any time.
"""

import contextlib
import queue
import threading
from collections.abc import Iterator
from typing import Any

_LOOK_SECONDS = 0.1  # how often a thread that cannot put looks whether it should end


class BaseDataLoader:
    """The batches of `_iterate`, each passed through `_process_batch`."""

    def __len__(self) -> int:
        raise NotImplementedError(f"{type(self).__name__} does not say how many batches it has")

    def _iterate(self) -> Iterator[Any]:
        raise NotImplementedError(
            f"{type(self).__name__} needs _iterate(), the batches of one epoch"
        )

    def _process_batch(self, batch: Any) -> Any:
        """What is done to a batch where it is used, as moving it to a GPU."""
        return batch

    def __iter__(self) -> Iterator[Any]:
        for batch in self._iterate():
            yield self._process_batch(batch)


class AsyncDataLoaderMixin(BaseDataLoader):
    """Stands before a loader's class.

    `async_loader_queue_size` batches are fetched ahead; 0 fetches them when asked.
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
        """End the thread; what it had fetched is dropped. The next loop starts anew."""
        self.finished_event.set()
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        with contextlib.suppress(queue.Empty):
            while True:
                self.queue.get_nowait()

    def _next(self) -> Any:
        """The next thing in the queue; None too when the loader was closed meanwhile."""
        while not self.finished_event.is_set():
            with contextlib.suppress(queue.Empty):
                return self.queue.get(timeout=_LOOK_SECONDS)
        return None

    def _work_ahead(self) -> None:
        try:
            while not self.finished_event.is_set():
                for batch in self._iterate():
                    if not self._put(batch):
                        return
                self._put(None)
        except Exception as error:
            self._put(error)

    def _put(self, item: Any) -> bool:
        """Whether there was room before the loader was closed."""
        while not self.finished_event.is_set():
            with contextlib.suppress(queue.Full):
                self.queue.put(item, timeout=_LOOK_SECONDS)
                return True
        return False
