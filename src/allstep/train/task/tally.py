"""Sums over samples: losses, weights, number of samples, and the sums of a task.

```
each batch    Tally.add                losses, weights, count, and the task's sums in float64
each rank     sums ── vector ──┐
all ranks                      ├─ added ── with_sums ── score: divided once
```

A tally of training has the task's `tracked` sums, known before the first batch, so that ranks
without samples have the same vector. A tally of an evaluation learns names and shapes from its
first batch; ranks without samples take those of the others (`with_layout`).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from allstep.errors import ConfigError
from allstep.train.task.task import Sums, Task
from allstep.train.watch.events import Score

RESERVED = frozenset(
    [
        "loss",
        "count",
        "kind",
        "time",
        "part",
        "epoch",
        "samples",
        "best",
        "seconds",
        "lr",
        "batch",
        "memory",
        "images_per_second",
        "input",
        "compute",
        "wait",
        "update",
        "grad_norm",
        "noise_scale",
        "trust",
        "counts",
        "sent",
        "received",
        "version",
    ]
)
"""Names of other figures in the lines of a run record."""


class Layout(NamedTuple):
    """Names and shapes of a task's sums, in the order of the vector."""

    names: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of(cls, sums: Sums) -> "Layout":
        """Return the layout of some sums."""
        return cls(tuple(sums), tuple(tuple(each.shape) for each in sums.values()))

    @property
    def sizes(self) -> list[int]:
        """The number of values of each sum."""
        return [math.prod(shape) for shape in self.shapes]

    def split(self, values: Sequence[float]) -> dict[str, Tensor]:
        """Return the sums of a vector by name, in float64."""
        parts = torch.split(torch.tensor(values, dtype=torch.float64), self.sizes)
        named = zip(self.names, parts, self.shapes, strict=True)
        return {name: part.reshape(shape) for name, part, shape in named}


class Tally:
    """Sums over the samples of a task. Adding tallies of disjoint samples gives that of them all.

    `layout` are the task's sums; None: the first batch has them. `has_metrics` is whether the task
    computes metrics from them.
    """

    def __init__(self, task: Task, layout: Layout | None = None, has_metrics: bool = True) -> None:
        self.task, self.layout, self.has_metrics = task, layout, has_metrics
        self.loss = self.weight = self.count = 0.0
        self.values = [0.0] * sum(layout.sizes) if layout is not None else []

    @classmethod
    def of_training(cls, task: Task) -> "Tally":
        """Return an empty tally of the sums that the task tracks in training."""
        names = task.tracked
        return cls(task, Layout(names, ((),) * len(names)), has_metrics=bool(names))

    def add(self, loss: Tensor, sums: Sums, count: int, weight: float | None = None) -> None:
        """Add samples, given the sum of their losses and their sums.

        `weight` is the sum of their weights (default: their number). Synchronizes with the device
        once.
        """
        self._fit(sums)
        flat = [each.detach().to(torch.float64).reshape(-1) for each in sums.values()]
        loss = loss.detach().to(torch.float64).reshape(1)
        first, *rest = torch.cat([loss, *flat]).tolist()
        self.loss += first
        self.weight += count if weight is None else weight
        self.count += count
        self.values = [mine + more for mine, more in zip(self.values, rest, strict=True)]

    def _fit(self, sums: Sums) -> None:
        """Take over the layout of the first batch; raise ConfigError if a later one has another."""
        found = Layout.of(sums)
        if self.layout is None:
            self.layout, self.values = found, [0.0] * sum(found.sizes)
        elif found != self.layout:
            raise ConfigError(
                f"task {type(self.task).__name__}: its sums are {_listed(found)} for one batch and"
                f" {_listed(self.layout)} for another; return the same names and shapes for each"
            )

    def __add__(self, other: "Tally") -> "Tally":
        return self.with_sums(
            [mine + theirs for mine, theirs in zip(self.sums(), other.sums(), strict=True)]
        )

    def sums(self) -> list[float]:
        """Return the sums as plain numbers, which ranks can add; `with_sums` is the inverse."""
        return [self.loss, self.weight, self.count, *self.values]

    def with_sums(self, sums: Iterable[float]) -> "Tally":
        """Return a tally of the same layout with other sums."""
        made = Tally(self.task, self.layout, self.has_metrics)
        made.loss, made.weight, made.count, *made.values = sums
        return made

    def with_layout(self, layouts: Iterable[Layout | None]) -> "Tally":
        """Return this tally with the layout that all ranks have; ranks without samples have None.

        Raise ConfigError if ranks have different ones.
        """
        known = [each for each in layouts if each is not None]
        made = Tally(self.task, known[0] if known else Layout(), self.has_metrics)
        for each in known:
            made._fit({name: torch.empty(shape) for name, shape in zip(*each, strict=True)})
        made.loss, made.weight, made.count = self.loss, self.weight, self.count
        made.values = self.values or made.values
        return made

    @property
    def mean_loss(self) -> float:
        """The loss of a score, without its metrics."""
        return self.loss / (self.weight or 1.0)

    def score(self) -> Score:
        """Return loss and metrics over the samples; loss 0 and no metrics without samples."""
        return Score(self.mean_loss, round(self.count), self._metrics())

    def _metrics(self) -> Mapping[str, float]:
        if not (self.has_metrics and self.count) or self.layout is None:
            return {}
        known = {"loss": self.loss, "weight": self.weight, "count": self.count}
        sums = {name: torch.tensor(each, dtype=torch.float64) for name, each in known.items()}
        found = self.task.metrics({**self.layout.split(self.values), **sums})
        if taken := [name for name in found if name in RESERVED]:
            raise ConfigError(
                f"task {type(self.task).__name__}: a metric is called {taken[0]!r}, as another"
                " figure of the run record is; give it another name"
            )
        return {name: float(value) for name, value in found.items()}


def _listed(layout: Layout) -> str:
    """Return names and shapes as text, such as hits (), confusion (10, 10)."""
    named = zip(layout.names, layout.shapes, strict=True)
    return ", ".join(f"{name} {shape}" for name, shape in named) or "none"
