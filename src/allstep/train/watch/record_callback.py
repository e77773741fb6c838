"""The callback that writes the run record, run.jsonl."""

import math
import platform
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from allstep._version import __version__
from allstep.machine import allowed_cores
from allstep.runlog import RunLog
from allstep.train.watch.callback import Callback
from allstep.train.watch.events import Evaluated, Opening, Progress, Result, Synchronized


class Record(Callback):
    """Callback that writes events to the run record.

    Lines that could not be written, for example to a full disk, are kept and written before the
    next line.
    """

    def __init__(self, log: RunLog) -> None:
        self.log = log
        self._num_bad = 0
        self._lines: deque[tuple[str, dict[str, Any]]] = deque(maxlen=100_000)
        self._lock = threading.Lock()

    def start(self, opening: Opening) -> None:
        self._write(
            "start",
            version=__version__,
            config=opening.config.model_dump(mode="json"),
            world={
                **asdict(opening.world),
                "hosts": list(opening.hosts),
                "threads": list(opening.threads),
            },
            machine=_machine(opening.device),
            data={
                "found": str(opening.data_folder),
                **opening.num_samples,
                **({"unused": opening.num_unused} if opening.num_unused else {}),
            },
            parameters=opening.parameters,
            bytes=opening.nbytes,
            flop_per_sample=opening.flop_per_sample,
            execution=opening.execution,
            precision=opening.precision,
            precision_why=opening.precision_why,
            share_weights=opening.share_weights,
            undo_bytes=opening.undo_nbytes,
            position=opening.position,
        )

    def take_over(self, opening: Opening) -> None:
        """Continue the record of the lost rank 0, which has its start."""

    def progress(self, progress: Progress) -> None:
        known = {field.name: getattr(progress, field.name) for field in fields(progress)}
        times = known.pop("times")
        self._write(
            "step", **times, **{name: value for name, value in known.items() if value is not None}
        )

    def evaluated(self, evaluated: Evaluated) -> None:
        if evaluated.num_bad > self._num_bad:
            self._num_bad = evaluated.num_bad
            text = (
                f"{evaluated.num_bad} samples were found bad and skipped so far; quarantine*.jsonl"
                " in the run folder lists them"
            )
            self.event(
                text, epoch=evaluated.epoch, samples=evaluated.samples, num_bad=evaluated.num_bad
            )
        score = asdict(evaluated.validation)
        self._write(
            "eval",
            part="validation",
            epoch=evaluated.epoch,
            samples=evaluated.samples,
            best=evaluated.is_best,
            **score,
        )

    def synchronized(self, point: Synchronized) -> None:
        self._write("sync", **asdict(point))

    def saved(self, samples: int, path: Path) -> None:
        self._write("checkpoint", samples=samples, path=path.name)

    def event(self, text: str, **figures: Any) -> None:
        self._write("event", text=text, **figures)

    def end(self, result: Result) -> None:
        if (train := result.train) is not None:
            figures = {"samples": train.samples, "seconds": train.seconds, **asdict(train.score)}
            self._write("eval", part="train", **figures)
        self._write("eval", part="test", samples=result.samples, **asdict(result.test))
        self._write("end", **{**asdict(result), "out": str(result.out)})

    def close(self) -> None:
        try:
            self._write_all()
        finally:
            self.log.close()

    def _write(self, kind: str, **values: Any) -> None:
        """Append a line of this kind to the run record."""
        self._lines.append((kind, {"time": self.log.now(), **values}))
        self._write_all()

    def _write_all(self) -> None:
        """Write all pending lines in their order; keep those that fail, and raise."""
        with self._lock:
            while self._lines:
                kind, values = self._lines.popleft()
                try:
                    getattr(self.log, kind)(**_plain(values))
                except OSError:
                    self._lines.appendleft((kind, values))
                    raise


def _plain(value: Any) -> Any:
    """Return `value` as types that JSON has.

    Numbers that are not finite become None: a gradient that overflowed is no reason to fail.
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else str(value)


def _machine(device: str) -> dict[str, Any]:
    """Return device, cores, system and Python version for the run record."""
    return {
        "device": device,
        "cores": allowed_cores(),
        "system": platform.platform(),
        "python": platform.python_version(),
    }
