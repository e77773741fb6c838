"""Saving checkpoints during training: a step only waits for a copy of the tensors, a thread writes.

```
training  ──step──step──[copy]──step──step──step──[copy]──step──
                          └──> writer: hash, write, fsync, rename, remove old ones, report
```

One checkpoint is written at a time. If the disk is so slow that the next one is ready before the
last is written, the newest waits and replaces one that waited, unless that is the best one.

The last `keep` checkpoints are kept, plus the best one: the newest best that is on the disk,
however many later ones could not be written. A best one that could not be written is kept in memory
and tried again before the next. Any error costs only that checkpoint: earlier checkpoints are kept,
the run continues, and the error is reported to `on_saved`. Weights that are not finite are not
written, so the last good ones are kept.

Checkpoints with a larger number than the one just written are from before the run was resumed from
an older one; they were damaged then. They do not count, and are removed.
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

from allstep import faults
from allstep.errors import AllstepError
from allstep.train.checkpoint import write_and_read as checkpoint
from allstep.train.checkpoint.names import number_of
from allstep.train.checkpoint.write_and_read import Snapshot, Tensors

PAUSES = (1.0, 2.0, 4.0)
"""Seconds between the attempts of `write_or_retry`."""


@dataclass(frozen=True)
class Saved:
    """Outcome of an attempt to write a checkpoint."""

    samples: int
    path: Path | None
    """Path of the checkpoint; None if it could not be written."""
    error: Exception | None = None
    """Reason why it could not be written."""
    seconds: float = 0.0
    """Duration of writing."""


@dataclass(frozen=True)
class _Pending:
    """A snapshot to write."""

    snapshot: Snapshot
    best: bool
    """True if it has the best validation score so far."""


class Saver:
    """Thread that writes checkpoints into `folder`; used by one process only, rank 0.

    `keep` is the number of recent checkpoints to keep, besides the best one. `on_saved` is called
    from the thread, once for each attempt. `find_broken` returns the name of a tensor that must not
    be written, or None.
    """

    def __init__(
        self,
        folder: Path,
        keep: int = 3,
        on_saved: Callable[[Saved], None] = lambda saved: None,
        find_broken: Callable[[Tensors], str | None] = lambda weights: None,
    ) -> None:
        self.folder, self.keep, self.on_saved, self.find_broken = (
            folder,
            keep,
            on_saved,
            find_broken,
        )
        self.best: int | None = None
        """Samples of the best checkpoint on disk, which is not removed."""
        self.last: int | None = None
        """Samples of the newest checkpoint that was written."""
        # If the run folder is moved away and another run's folder gets its name, nothing may be
        # written there.
        self._identity = _identity(folder.parent)
        self._waiting: list[_Pending] = []
        self._failed_best: list[_Pending] = []
        self._ending = False
        self._changed = threading.Condition()
        with contextlib.suppress(OSError):
            # Sweep now, because a run that was killed while it removed a checkpoint may write none.
            checkpoint.sweep(folder)
        self._thread = threading.Thread(target=self._work, name="allstep-saver", daemon=True)
        self._thread.start()

    def save(self, snapshot: Snapshot, best: bool = False) -> None:
        """Copy the tensors now, and have the thread write them."""
        copied = replace(
            snapshot, weights=_copy(snapshot.weights), optimizer=_copy(snapshot.optimizer)
        )
        with self._changed:
            if not self._thread.is_alive():
                raise AllstepError(
                    f"{self.folder}: the thread that writes checkpoints has ended; nothing would be"
                    " saved"
                )
            before = (
                [] if best else [each for each in self._failed_best + self._waiting if each.best]
            )
            self._waiting, self._failed_best = [*before[-1:], _Pending(copied, best)], []
            self._changed.notify()

    @property
    def is_open(self) -> bool:
        """Return whether `save` may be called: not after `close`."""
        return not self._ending

    def close(self) -> None:
        """Wait until all pending checkpoints have been written or have failed."""
        with self._changed:
            self._ending = True
            self._changed.notify()
        self._thread.join()

    def write_or_retry(self, snapshot: Snapshot) -> Saved:
        """Write `snapshot` in this thread, after `close`, and retry for some seconds on OSError.

        A success is also reported to `on_saved`; a failure is only returned.
        """
        is_best = any(each.snapshot.samples == snapshot.samples for each in self._failed_best)
        for pause in (*PAUSES, None):
            best_first = [each for each in self._failed_best if not is_best]
            *_, saved = [self._write(each) for each in [*best_first, _Pending(snapshot, is_best)]]
            if pause is None or not isinstance(saved.error, OSError):
                break
            time.sleep(pause)
        if saved.path is not None:
            self.on_saved(saved)
        return saved

    def _work(self) -> None:
        """Write pending checkpoints until the end (the code of the thread)."""
        while (pending := self._take()) is not None:
            self.on_saved(self._write(pending))

    def _take(self) -> _Pending | None:
        """Wait for the next pending checkpoint and return it; return None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._ending)
            return self._waiting.pop(0) if self._waiting else None

    def _write(self, pending: _Pending) -> Saved:
        """Write a checkpoint and remove outdated ones; return the outcome."""
        snapshot, started = pending.snapshot, time.monotonic()
        try:
            self._check_folder()
            if broken := self.find_broken(snapshot.weights):
                raise ValueError(f"{broken} is not finite")
            if faults.active is not None:
                faults.active.at_write(str(self.folder))
            path = checkpoint.write(self.folder, snapshot)
        except Exception as error:
            # Any error, also a lack of memory: the next attempt may succeed.
            if pending.best and isinstance(error, OSError):
                with self._changed:
                    self._failed_best = [pending]
            return Saved(snapshot.samples, None, error)
        self._record(pending)
        self._tidy()
        return Saved(snapshot.samples, path, seconds=time.monotonic() - started)

    def _check_folder(self) -> None:
        """Raise OSError if the run folder is no longer the one in which the run started."""
        folder = self.folder.parent
        if self._identity is not None and _identity(folder) != self._identity:
            moved = "the run's folder was moved or replaced by another"
            raise OSError(errno.ESTALE, moved, str(folder))

    def _record(self, written: _Pending) -> None:
        """Record a checkpoint that was written as the last one, and as the best if it is."""
        # A best one that could not be written at first may come after a newer one.
        self.last = max(written.snapshot.samples, self.last or 0)
        if written.best:
            self.best = written.snapshot.samples
            with self._changed:
                self._failed_best = []

    def _tidy(self) -> None:
        """Remove outdated checkpoints."""
        assert self.last is not None
        with contextlib.suppress(OSError):
            for old in outdated(checkpoint.written(self.folder), self.last, self.keep, self.best):
                checkpoint.remove(old)


def _identity(folder: Path) -> tuple[int, int] | None:
    """Return device and inode of a folder, or None if it does not exist."""
    try:
        found = folder.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def outdated(newest_first: Sequence[Path], last: int, keep: int, best: int | None) -> list[Path]:
    """Return the checkpoints to remove.

    These are the ones after `last`, and up to `last` all but the newest `keep` and the best.
    """
    later = [path for path in newest_first if (number_of(path.name) or 0) > last]
    return later + [
        path for path in newest_first[len(later) :][keep:] if number_of(path.name) != best
    ]


def first_not_finite(model: nn.Module, weights: Tensors | None = None) -> str | None:
    """Return the name of the first tensor with NaN or infinity, or None.

    The tensors are `weights`, by default the model's own. Only parameters and running statistics of
    norms are checked: other buffers are the user's, and for example a mask may hold infinities.
    """
    weights = model.state_dict() if weights is None else weights
    norms = {name for name, module in model.named_modules() if isinstance(module, _NormBase)}
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for name, tensor in weights.items():
        is_checked = name in parameters or name.rpartition(".")[0] in norms
        if is_checked and tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            return name
    return None


def _copy(tensors: Tensors) -> Tensors:
    """Return copies of the tensors."""
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}
