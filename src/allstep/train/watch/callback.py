"""Callbacks: objects that a run calls with its events.

```
run ── Opening, Progress, ..., Result ────────> Callbacks ─┬─> Record        run.jsonl
                                                           ├─> Display       the terminal
                                                           ├─> TensorBoard   tensorboard/
                                                           └─> your own      a subclass of Callback
```

A callback overrides the methods of `Callback` that it needs. An exception in one of them does not
end the run: `Callbacks` reports it to the other callbacks. `saved` and `event` may be called from
another thread than the rest.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from allstep.train.watch.events import Evaluated, Opening, Progress, Result, Synchronized


class Callback:
    """Base class of callbacks: receives the events of a run.

    Each method does nothing unless it is overridden. Pass instances to `train`.
    """

    def start(self, opening: Opening) -> None:
        """Handle the start of training, also when a run resumes."""

    def take_over(self, opening: Opening) -> None:
        """Handle the loss of rank 0 in an elastic run: this process reports from now on.

        Default: like `start`.
        """
        self.start(opening)

    def progress(self, progress: Progress) -> None:
        """Handle the figures of the last `log_every` steps.

        Called between two steps, so it should return quickly.
        """

    def synchronized(self, point: Synchronized) -> None:
        """Handle a synchronization point of asynchronous training."""

    def evaluated(self, evaluated: Evaluated) -> None:
        """Handle a score of the validation split."""

    def saved(self, samples: int, path: Path) -> None:
        """Handle a checkpoint that was written to `path` after `samples` samples."""

    def event(self, text: str, **figures: Any) -> None:
        """Handle another event: a line of text, and the figures behind it."""

    def end(self, result: Result) -> None:
        """Handle the result of the run. Not called for a run that fails."""

    def close(self) -> None:
        """Release resources. This is the last call, whether the run failed or not."""


class Callbacks(Callback):
    """Pass every event to several callbacks.

    A callback that raises is removed, except for system errors such as a full disk, which may go
    away. Either is reported to the other callbacks, once.
    """

    def __init__(self, callbacks: Sequence[Callback] = ()) -> None:
        self.callbacks = list(callbacks)
        self._failed: set[int] = set()

    def start(self, opening: Opening) -> None:
        self._call("start", opening)

    def take_over(self, opening: Opening) -> None:
        self._call("take_over", opening)

    def progress(self, progress: Progress) -> None:
        self._call("progress", progress)

    def synchronized(self, point: Synchronized) -> None:
        self._call("synchronized", point)

    def evaluated(self, evaluated: Evaluated) -> None:
        self._call("evaluated", evaluated)

    def saved(self, samples: int, path: Path) -> None:
        self._call("saved", samples, path)

    def event(self, text: str, **figures: Any) -> None:
        self._call("event", text, **figures)

    def end(self, result: Result) -> None:
        self._call("end", result)

    def close(self) -> None:
        self._call("close")

    def _call(self, method: str, *values: Any, **figures: Any) -> None:
        """Call a method of every callback; report callbacks that raise."""
        for callback in tuple(self.callbacks):
            try:
                getattr(callback, method)(*values, **figures)
            except Exception as error:
                self._note(callback, error, is_last_call=method == "close")

    def _note(self, callback: Callback, error: Exception, is_last_call: bool) -> None:
        """Report the exception of a callback to the other callbacks, once per callback.

        Remove the callback unless the error is a system error. After the last call nothing is
        reported.
        """
        may_recover = isinstance(error, OSError)
        if not may_recover and callback in self.callbacks:
            self.callbacks.remove(callback)
        is_new, name = id(callback) not in self._failed, type(callback).__name__
        self._failed.add(id(callback))
        if is_new and not is_last_call:
            after = "" if may_recover else "; it receives no further events"
            self.event(f"{name} failed, the run continues: {type(error).__name__}: {error}{after}")
