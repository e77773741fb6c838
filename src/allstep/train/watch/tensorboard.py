"""TensorBoard events: `tensorboard --logdir RUN` draws a run while it is running.

The x axis counts samples.

```
run ──Progress──> queue ──> thread: figures by tag ──> Event message ──> TFRecord frame
                                                                                  | one write
                                                                       events.out.tfevents.*
```

The run only pays for putting an event into a queue. The message classes are those of the package
tensorboard, and the framing is that of `data.sources.tfrecord`. The writers of torch and
tensorboard are not used, because they import all of TensorFlow where it is installed, which takes
seconds.

A resumed run writes another file. Its first event discards the figures of samples after the
checkpoint. An error in the thread is raised once, at the next event of the run; `Callbacks` reports
it, and the events after it are dropped.

| Tag | Figures |
|---|---|
| `loss/*`, each metric such as `accuracy/*` | of train, validation, test; train-sample: below |
| `rate`, `batch`, `grad_norm`, `noise_scale`, `trust/LAYER` | of the optimizer; `rate` is the lr |
| `images_per_second`, `seconds_per_epoch` | speed |
| `input/RANK`, `compute/RANK`, `wait/RANK`, `update/RANK` | fractions of a worker's time |
| `memory/RANK` | bytes |
| `num_bad` | number of bad samples that were skipped |

`train-sample` is the score of a sample of the training split at the end, in evaluation mode. With
more than 16 workers, `mean` and `most` (the maximum) replace the figures by rank.
"""

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from allstep.data.sources.tfrecord.framing import frame
from allstep.train.watch.callback import Callback
from allstep.train.watch.events import Evaluated, Opening, Pace, Progress, Result, Score

_MAX_WORKERS = 16
"""Up to this many workers have figures of their own."""
_MAX_QUEUED = 10_000
"""Events in the queue while the disk does not respond; further ones are dropped."""

_Event = dict[str, Any]
"""Fields of TensorBoard's message `Event`."""


class TensorBoard(Callback):
    """Callback that writes TensorBoard's events into `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._queue: queue.Queue[tuple[float, Callable[[], _Event]] | None]
        self._queue = queue.Queue(_MAX_QUEUED)
        self._thread = threading.Thread(target=self._work, name="allstep-tensorboard", daemon=True)
        self._num_train, self._pace = 0, Pace()
        self._error: Exception | None = None
        self._is_silent = False

    def start(self, opening: Opening) -> None:
        self._num_train = opening.num_samples["train"]
        self._put(lambda: {"file_version": "brain.Event:2"})
        if opening.position:
            self._put(lambda: {"session_log": {"status": "START"}, "step": opening.position + 1})
        self._thread.start()

    def progress(self, progress: Progress) -> None:
        self._pace.add(progress)
        self._put(lambda: _event(progress.samples, dict(_of_progress(progress))))

    def evaluated(self, evaluated: Evaluated) -> None:
        figures = _of_score("validation", evaluated.validation) | {"num_bad": evaluated.num_bad}
        if speed := self._pace.take(evaluated):
            figures["seconds_per_epoch"] = self._num_train / speed
        self._put(lambda: _event(evaluated.samples, figures))

    def end(self, result: Result) -> None:
        self._put(lambda: _event(result.samples, _of_score("test", result.test)))
        if (train := result.train) is not None:
            self._put(lambda: _event(train.samples, _of_score("train-sample", train.score)))

    def close(self) -> None:
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()

    def _put(self, make: Callable[[], _Event]) -> None:
        """Queue an event with the current time; `make` runs in the thread."""
        self._raise_once()
        if not self._is_silent:
            try:
                self._queue.put_nowait((time.time(), make))
            except queue.Full:
                return

    def _raise_once(self) -> None:
        """Raise the error of the thread, if there is one, and forget it."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _work(self) -> None:
        """Write queued events until the end of the run (the code of the thread)."""
        try:
            self._write_all()
        except Exception as error:
            self._error, self._is_silent = error, True
            # Empty the queue until the end, so that neither `_put` nor `close` waits.
            while self._queue.get() is not None:
                continue

    def _write_all(self) -> None:
        """Write queued events into a new file until None arrives."""
        from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[import-untyped]

        self.folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads the files in the order of their names.
        path = self.folder / f"events.out.tfevents.{time.time():017.6f}.{os.getpid()}"
        with path.open("ab", buffering=0) as file:
            while (queued := self._queue.get()) is not None:
                when, make = queued
                file.write(frame(Event(wall_time=when, **make()).SerializeToString()))


def _event(samples: int, figures: Mapping[str, float]) -> _Event:
    """Return the event of some figures at a number of samples."""
    values = [{"tag": tag, "simple_value": value} for tag, value in figures.items()]
    return {"step": samples, "summary": {"value": values}}


def _of_score(split: str, score: Score) -> dict[str, float]:
    """Return the figures of a score by tag."""
    figures = {"loss": score.loss, **score.metrics}
    return {f"{name}/{split}": value for name, value in figures.items()}


def _of_progress(progress: Progress) -> Iterator[tuple[str, float]]:
    """Yield tags and figures of `progress`."""
    yield "loss/train", progress.loss
    yield from ((f"{name}/train", value) for name, value in progress.metrics.items())
    yield "rate", progress.lr
    yield "batch", progress.batch
    yield "images_per_second", progress.images_per_second
    if progress.grad_norm is not None:
        yield "grad_norm", progress.grad_norm
    if progress.noise_scale is not None:
        yield "noise_scale", progress.noise_scale
    for layer, ratio in (progress.trust or {}).items():
        yield f"trust/{layer}", ratio
    totals = [sum(by_phase) for by_phase in zip(*progress.times.values(), strict=True)]
    for phase, seconds in progress.times.items():
        by_rank = zip(seconds, totals, strict=True)
        yield from _by_rank(phase, [spent / total if total else 0.0 for spent, total in by_rank])
    yield from _by_rank("memory", progress.memory)


def _by_rank(name: str, values: Sequence[float]) -> Iterator[tuple[str, float]]:
    """Yield tags and values by rank, or mean and maximum for many ranks."""
    if len(values) <= _MAX_WORKERS:
        yield from ((f"{name}/{rank}", value) for rank, value in enumerate(values))
    else:
        yield f"{name}/mean", sum(values) / len(values)
        yield f"{name}/most", max(values)
