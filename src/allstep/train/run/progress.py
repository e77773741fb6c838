"""Where a run stands: all that changes during a run besides tensors, as plain values that a
checkpoint can hold.

It is the same on all ranks, and knows neither the time nor the number of workers: a run that was
killed and resumed arrives at the same.
"""

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from allstep.train.task.task import Metric, Tally, Task
from allstep.train.watch.events import Score


@dataclass
class RunProgress:
    """How far a run has come, and how it went."""

    samples: int = 0
    """Trained on so far; the position of the next batch."""
    updates: int = 0
    batch: int = 0
    """Samples of an update; it may grow."""
    best: Score | None = None
    """On the validation part."""
    best_samples: int = 0
    worse: int = 0
    """Evaluations since the best one."""
    since: Tally = field(kw_only=True)
    """The training samples since the last evaluation."""
    owes: int | None = None
    """Samples before the last step, when what was due after it (an evaluation, growth, a
    checkpoint) is still to be done."""

    def note(self, validation: Score, metric: Metric) -> bool:
        """Take an evaluation into account. Return whether it is the best so far, by `metric`."""
        is_best = metric.is_better(validation, self.best)
        if is_best:
            self.best, self.best_samples, self.worse = validation, self.samples, 0
        else:
            self.worse += 1
        self.since = self.since.with_sums([0.0 for _ in self.since.sums()])
        return is_best

    def to_plain(self) -> dict[str, Any]:
        """For a checkpoint."""
        best = asdict(self.best) if self.best else None
        return {
            **{name: getattr(self, name) for name in _PLAIN},
            "best": best,
            "since": self.since.sums(),
        }

    @classmethod
    def from_plain(cls, plain: dict[str, Any], task: Task) -> "RunProgress":
        """From a checkpoint of a run of this task."""
        best = Score(**plain["best"]) if plain["best"] else None
        return cls(
            **{name: plain[name] for name in _PLAIN},
            best=best,
            since=task.tally().with_sums(plain["since"]),
        )


_PLAIN = ("samples", "updates", "batch", "best_samples", "worse", "owes")


def crossed(before: int, after: int, interval: float | None) -> bool:
    """Whether the way from `before` to `after` samples leads over a multiple of `interval`: a
    property of the position alone."""
    return interval is not None and _intervals(after, interval) > _intervals(before, interval)


def _intervals(samples: int, interval: float) -> int:
    """Whole ones up to there.

    An interval such as 0.1 x 1337 is a little too long as a float, so a millionth may be missing.
    """
    return math.floor(samples / interval + 1e-6)
