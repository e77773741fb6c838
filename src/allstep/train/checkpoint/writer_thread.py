"""Saves checkpoints beside the training: a step pays for a copy of the tensors, a thread does the
rest.

```
training  ──step──step──[copy]──step──step──step──[copy]──step──
                          └──> writer: hash, write, fsync, rename, remove old ones, tell
```

One is written at a time. If the disk is so slow that the next one comes before the last is done,
the newest waits and replaces one that waited, unless that is the best one.

The last `keep` checkpoints stay, and the best one: the newest best that is on the disk, however
many came after it that could not be written. A best one that the disk does not take is kept in
memory and tried again before the next. Whatever goes wrong costs that checkpoint, and nothing else:
what was there stays, the run goes on, and whoever listens is told. Weights that are not finite are
not written: the last good ones stay.

Checkpoints with a larger number than the one just written are of a former life of the run (damaged
ones, since it went on from further back). They count for nothing, and go.
"""

import contextlib
import errno
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from allstep.errors import AllstepError
from allstep.train.checkpoint import files as checkpoint
from allstep.train.checkpoint.files import Snapshot, Tensors
from allstep.train.checkpoint.names import number_of

PAUSES = (1.0, 2.0, 4.0)
"""Seconds between the attempts to write what must be written."""


@dataclass(frozen=True)
class Saved:
    """A checkpoint was written, or could not be."""

    samples: int
    path: Path | None
    error: Exception | None = None
    seconds: float = 0.0
    """That writing it took."""


@dataclass(frozen=True)
class _Asked:
    snapshot: Snapshot
    best: bool


class Saver:
    """Writes into `folder` (one process only, rank 0). `tell` is called from the writer's thread,
    once for each attempt.

    find_broken: names a tensor that must not be written, if there is one.
    """

    def __init__(
        self,
        folder: Path,
        keep: int = 3,
        tell: Callable[[Saved], None] = lambda saved: None,
        find_broken: Callable[[Tensors], str | None] = lambda weights: None,
    ) -> None:
        self.folder, self.keep, self.tell, self.find_broken = folder, keep, tell, find_broken
        self.best: int | None = None
        """Samples of the checkpoint on disk that must stay, whatever comes."""
        self.last: int | None = None
        """Samples of the newest one that was written."""
        # Checkpoints of a folder that was moved away must not land in another run's that has its
        # name now.
        self._identity = _identity(folder.parent)
        self._waiting: list[_Asked] = []
        self._refused: list[_Asked] = []
        self._ending = False
        self._changed = threading.Condition()
        with contextlib.suppress(OSError):
            # Also where this run writes none: it may have been killed while it removed an old one.
            checkpoint.sweep(folder)
        self._thread = threading.Thread(target=self._work, name="allstep-saver", daemon=True)
        self._thread.start()

    def save(self, snapshot: Snapshot, best: bool = False) -> None:
        """Copies the tensors now and writes them soon."""
        copied = replace(
            snapshot, weights=_copy(snapshot.weights), optimizer=_copy(snapshot.optimizer)
        )
        with self._changed:
            if not self._thread.is_alive():
                raise AllstepError(
                    f"{self.folder}: the thread that writes checkpoints has ended; nothing would be"
                    " saved"
                )
            before = [] if best else [each for each in self._refused + self._waiting if each.best]
            self._waiting, self._refused = [*before[-1:], _Asked(copied, best)], []
            self._changed.notify()

    def close(self) -> None:
        """Waits until all is written, or was tried."""
        with self._changed:
            self._ending = True
            self._changed.notify()
        self._thread.join()

    def insist(self, snapshot: Snapshot) -> Saved:
        """After `close`: writes `snapshot` here and now; while the disk does not take it, again and
        again for some seconds.

        A failure is told by the return value alone.
        """
        is_best = any(each.snapshot.samples == snapshot.samples for each in self._refused)
        for pause in (*PAUSES, None):
            best_first = [each for each in self._refused if not is_best]
            *_, saved = [self._write(each) for each in [*best_first, _Asked(snapshot, is_best)]]
            if pause is None or not isinstance(saved.error, OSError):
                break
            time.sleep(pause)
        if saved.path is not None:
            self.tell(saved)
        return saved

    def _work(self) -> None:
        while (asked := self._take()) is not None:
            self.tell(self._write(asked))

    def _take(self) -> _Asked | None:
        """The one that waits, as soon as there is one; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._ending)
            return self._waiting.pop(0) if self._waiting else None

    def _write(self, asked: _Asked) -> Saved:
        snapshot, started = asked.snapshot, time.monotonic()
        try:
            if self._identity is not None and _identity(self.folder.parent) != self._identity:
                raise OSError(
                    errno.ESTALE,
                    "the run's folder was moved or replaced by another",
                    str(self.folder.parent),
                )
            if broken := self.find_broken(snapshot.weights):
                raise ValueError(f"{broken} is not finite")
            path = checkpoint.write(self.folder, snapshot)
        except Exception as error:  # also memory that is short: the next one may do better
            if asked.best and isinstance(error, OSError):
                with self._changed:
                    self._refused = [asked]
            return Saved(snapshot.samples, None, error)
        self._note(asked)
        self._tidy()
        return Saved(snapshot.samples, path, seconds=time.monotonic() - started)

    def _note(self, written: _Asked) -> None:
        self.last = max(
            written.snapshot.samples, self.last or 0
        )  # a best one that was refused comes late
        if written.best:
            self.best = written.snapshot.samples
            with self._changed:
                self._refused = []

    def _tidy(self) -> None:
        """Removes what nobody needs."""
        assert self.last is not None
        with contextlib.suppress(OSError):
            for old in outdated(checkpoint.written(self.folder), self.last, self.keep, self.best):
                checkpoint.remove(old)


def _identity(folder: Path) -> tuple[int, int] | None:
    """What tells a folder from another of its name; None where there is none."""
    try:
        found = folder.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def outdated(newest_first: Sequence[Path], last: int, keep: int, best: int | None) -> list[Path]:
    """Those beyond the `keep` up to `last` that are not the best, and those after `last`."""
    later = [path for path in newest_first if (number_of(path.name) or 0) > last]
    return later + [
        path for path in newest_first[len(later) :][keep:] if number_of(path.name) != best
    ]


def first_not_finite(model: nn.Module, weights: Tensors | None = None) -> str | None:
    """The name of the first tensor in which there is something else than numbers: of `weights`,
    else of the model as it is.

    Parameters and what norms keep are looked at. Other buffers are the user's: a mask may hold
    infinities.
    """
    weights = model.state_dict() if weights is None else weights
    norms = {name for name, module in model.named_modules() if isinstance(module, _NormBase)}
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for name, tensor in weights.items():
        looked_at = name in parameters or name.rpartition(".")[0] in norms
        if looked_at and tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            return name
    return None


def _copy(tensors: Tensors) -> Tensors:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}
