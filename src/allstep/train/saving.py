"""Saves checkpoints beside the training: a step pays for a copy of the tensors, a thread does the rest.

```
training  ──step──step──[copy]──step──step──step──[copy]──step──
                          └──> writer: hash, write, fsync, rename, remove old ones, tell
```

One is written at a time. If the disk is so slow that the next one comes before the last is done, the newest waits and replaces one that
waited, unless that is the best one.
The last `keep` checkpoints stay, and the best one. A disk that is full costs that checkpoint, and nothing else: what was there
stays, the run goes on, and whoever listens is told. Weights that are not finite are not written: the last good ones stay.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from allstep.train import checkpoint
from allstep.train.checkpoint import Snapshot, Tensors


@dataclass(frozen=True)
class Saved:
    """A checkpoint was written, or could not be."""

    samples: int
    path: Path | None
    error: OSError | ValueError | None = None
    seconds: float = 0.0
    """That writing it took."""


class Saver:
    """Writes into `folder` (one process only, rank 0). `tell` is called from the writer's thread, once for each checkpoint."""

    def __init__(self, folder: Path, keep: int = 3, tell: Callable[[Saved], None] = lambda saved: None) -> None:
        self.folder, self.keep, self.tell = folder, keep, tell
        self.best: int | None = None
        """Samples of the checkpoint that must stay, whatever comes."""
        self._waiting: list[Snapshot] = []
        self._ending = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="allstep-saver", daemon=True)
        self._thread.start()

    def save(self, snapshot: Snapshot, best: bool = False) -> None:
        """Copies the tensors now and writes them soon."""
        copied = replace(snapshot, weights=_copy(snapshot.weights), optimizer=_copy(snapshot.optimizer))
        with self._changed:
            if best:
                self.best = snapshot.samples
            self._waiting = [each for each in self._waiting if each.samples == self.best] + [copied]
            self._changed.notify()

    def close(self) -> None:
        """Waits until all is written."""
        with self._changed:
            self._ending = True
            self._changed.notify()
        self._thread.join()

    def _work(self) -> None:
        while (snapshot := self._take()) is not None:
            self.tell(self._write(snapshot))

    def _take(self) -> Snapshot | None:
        """The one that waits, as soon as there is one; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._ending)
            return self._waiting.pop(0) if self._waiting else None

    def _write(self, snapshot: Snapshot) -> Saved:
        started = time.monotonic()
        try:
            _check_finite(snapshot.weights)
            path = checkpoint.write(self.folder, snapshot)
        except (OSError, ValueError) as error:
            return Saved(snapshot.samples, None, error)
        for old in outdated(checkpoint.written(self.folder), self.keep, self.best):
            checkpoint.remove(old)
        return Saved(snapshot.samples, path, seconds=time.monotonic() - started)


def outdated(newest_first: Sequence[Path], keep: int, best: int | None) -> list[Path]:
    """Those beyond the last `keep` that are not the best."""
    return [path for path in newest_first[keep:] if int(path.name) != best]


def _check_finite(weights: Tensors) -> None:
    """Weights that are no longer numbers must not replace good ones."""
    for name, tensor in weights.items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise ValueError(f"{name} is not finite")


def _copy(tensors: Tensors) -> Tensors:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}
