"""TensorBoard events: `tensorboard --logdir RUN` draws the run while it goes on. The x axis counts
samples, as everything here does.

```
run ──Progress──> queue ──> thread: tags and figures, Event message, TFRecord frame, one write ──> events.out.tfevents.*
```

The run pays for putting what it is told on a queue. The message classes are tensorboard's own, the
framing is that of our TFRecords: the writers of torch and tensorboard import all of TensorFlow
where it is installed, which takes seconds.

A run that goes on writes a further file, which begins by taking back what an earlier part told of
samples after the checkpoint. What goes wrong in the thread is raised at the next word from the run,
once; `Callbacks` tells it, and from then on there is silence here.

| Tag | |
|---|---|
| `loss/*`, `accuracy/*`, `top5/*` | of train, validation and test; train-sample: at the end, in evaluation mode |
| `rate`, `batch`, `grad_norm`, `noise_scale`, `trust/LAYER` | of the optimizer |
| `images_per_second`, `seconds_per_epoch` | speed |
| `input/RANK`, `compute/RANK`, `wait/RANK`, `update/RANK` | parts of a worker's time; of more than 16 workers the mean and the most |
| `memory/RANK` | bytes |
| `num_bad` | samples that were skipped |
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

_MOST_WORKERS = 16
_MOST_WAITING = 10_000  # events, when a disk stands still; those after it are lost

_Event = dict[str, Any]  # the fields of TensorBoard's message


class TensorBoard(Callback):
    """Writes events into `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._queue: queue.Queue[tuple[float, Callable[[], _Event]] | None] = queue.Queue(
            _MOST_WAITING
        )
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
        self._raise_once()
        if not self._is_silent:
            try:
                self._queue.put_nowait((time.time(), make))
            except queue.Full:
                return

    def _raise_once(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _work(self) -> None:
        try:
            self._write_all()
        except Exception as error:
            self._error, self._is_silent = error, True
            while (
                self._queue.get() is not None
            ):  # nobody may wait for room in the queue, nor for the end
                continue

    def _write_all(self) -> None:
        from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[import-untyped]

        self.folder.mkdir(parents=True, exist_ok=True)
        path = (
            self.folder / f"events.out.tfevents.{time.time():017.6f}.{os.getpid()}"
        )  # read in the order of names
        with path.open("ab", buffering=0) as file:
            while (told := self._queue.get()) is not None:
                when, make = told
                file.write(frame(Event(wall_time=when, **make()).SerializeToString()))


def _event(samples: int, figures: Mapping[str, float]) -> _Event:
    values = [{"tag": tag, "simple_value": value} for tag, value in figures.items()]
    return {"step": samples, "summary": {"value": values}}


def _of_score(part: str, score: Score) -> dict[str, float]:
    return {
        f"loss/{part}": score.loss,
        f"accuracy/{part}": score.accuracy,
        f"top5/{part}": score.top5,
    }


def _of_progress(progress: Progress) -> Iterator[tuple[str, float]]:
    yield "loss/train", progress.loss
    yield "accuracy/train", progress.accuracy
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
        shares = [
            spent / total if total else 0.0 for spent, total in zip(seconds, totals, strict=True)
        ]
        yield from _by_rank(phase, shares)
    yield from _by_rank("memory", progress.memory)


def _by_rank(name: str, values: Sequence[float]) -> Iterator[tuple[str, float]]:
    if len(values) <= _MOST_WORKERS:
        yield from ((f"{name}/{rank}", value) for rank, value in enumerate(values))
    else:
        yield f"{name}/mean", sum(values) / len(values)
        yield f"{name}/most", max(values)
