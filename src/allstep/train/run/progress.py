"""The progress of a run: the state that changes besides tensors, as plain values for checkpoints.

It is the same on all ranks, and depends neither on the time nor on the number of workers: a run
that was killed and resumed arrives at the same values.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from allstep.errors import CheckpointError
from allstep.train.task.tally import Tally
from allstep.train.task.task import Task
from allstep.train.watch.events import Figures, Score


@dataclass
class RunProgress:
    """The position of a run, its best score and what is still due."""

    samples: int = 0
    """Samples trained on so far: the position of the next batch."""
    updates: int = 0
    """Updates of the weights so far."""
    batch: int = 0
    """Samples of an update; it may grow during the run."""
    best: Score | None = None
    """The best score on the validation split so far."""
    best_samples: int = 0
    """The value of `samples` at the best score."""
    worse: int = 0
    """Number of evaluations since the best one."""
    since: Tally = field(kw_only=True)
    """Tally of the training samples since the last evaluation."""
    owes: int | None = None
    """Samples before the last step, if what is due after it (an evaluation, growth, a checkpoint)
    has not been completed; else None."""

    def note(self, validation: Score, figures: Figures) -> bool:
        """Take an evaluation into account. Return whether it is the best so far, by `figures`."""
        is_best = figures.is_better(validation, self.best)
        if is_best:
            self.best, self.best_samples, self.worse = validation, self.samples, 0
        else:
            self.worse += 1
        self.since = self.since.with_sums([0.0 for _ in self.since.sums()])
        return is_best

    def to_plain(self) -> dict[str, Any]:
        """Return the state as plain values for a checkpoint."""
        best = self.best.to_plain() if self.best else None
        return {
            **{name: getattr(self, name) for name in _PLAIN},
            "best": best,
            "since": self.since.sums(),
        }

    @classmethod
    def from_plain(cls, plain: dict[str, Any], task: Task) -> "RunProgress":
        """Return the progress that `to_plain` stored in a checkpoint of a run of `task`."""
        best = Score.from_plain(plain["best"]) if plain["best"] else None
        return cls(
            **{name: plain[name] for name in _PLAIN},
            best=best,
            since=_tally(task, plain["since"]),
        )


def _tally(task: Task, sums: Sequence[float]) -> Tally:
    """Return the tally of some sums; CheckpointError if they are those of another task."""
    made = Tally.of_training(task)
    if len(sums) == 4 and len(made.sums()) == 5:
        # Before there were other tasks: loss, correct, top-5, count.
        loss, *tracked, count = sums
        sums = [loss, count, count, *tracked]
    if len(sums) != len(made.sums()):
        raise CheckpointError(
            f"the checkpoint has {len(sums)} sums of a task, and task {type(task).__name__} has"
            f" {len(made.sums())}: it belongs to a run of another task"
        )
    return made.with_sums(sums)


@dataclass(frozen=True)
class Paused:
    """The result of a run that stopped before its end and was saved, so that it can be resumed."""

    samples: int
    """Samples that the run has trained on."""
    why: str
    """The reason for stopping."""
    is_saved_here: bool = False
    """Whether this rank has written the checkpoint."""


_PLAIN = ("samples", "updates", "batch", "best_samples", "worse", "owes")


def crossed(before: int, after: int, interval: float | None) -> bool:
    """Return whether a multiple of `interval` samples is between `before` and `after` samples.

    The result depends only on the position, not on time or on earlier calls. None never is.
    """
    return interval is not None and _intervals(after, interval) > _intervals(before, interval)


def _intervals(samples: int, interval: float) -> int:
    """Return the number of complete intervals in `samples`.

    An interval such as 0.1 x 1337 is slightly too long as a float, so a millionth may be missing.
    """
    return math.floor(samples / interval + 1e-6)
