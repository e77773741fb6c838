"""Results of a study of updates to a goal, next to published results."""

from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from allstep.console.markdown_table import table
from allstep.study.fit import Fit, fit
from allstep.study.results import RunFigures
from allstep.study.trial import Results, Trial
from allstep.study.updates.published import PUBLISHED, Published
from allstep.study.updates.study import UpdatesSearch, fewest


@dataclass(frozen=True)
class Row:
    """The results of one batch."""

    batch: int
    best: tuple[float, int] | None
    """Best learning rate and its updates to the goal; None if no run reached the goal."""
    tried: tuple[tuple[float, RunFigures], ...]
    """All learning rates that were tried, with the figures of their runs."""
    before: "Row | None"
    """Row of the next smaller batch."""

    @property
    def ratio(self) -> float | None:
        """Updates of the next smaller batch per update of this one; None if one is unknown."""
        if self.best is None or self.before is None or self.before.best is None:
            return None
        return self.before.best[1] / self.best[1]


@dataclass(frozen=True)
class UpdatesTable:
    """The results of a study of updates, with a row for each batch."""

    search: UpdatesSearch
    results: Results

    @property
    def published(self) -> Published | None:
        """Published results about the same dataset; None if there are none."""
        return PUBLISHED.get(self.search.data)

    @cached_property
    def rows(self) -> list[Row]:
        """The rows in rising order of the batch."""
        found: list[Row] = []
        for batch in sorted(self.search.batches):
            ended, _ = self.search.chain(batch, self.results)
            tried = tuple((float(trial.facts["lr"]), run) for trial, run in _by_rate(ended))
            found.append(Row(batch, fewest(ended), tried, found[-1] if found else None))
        return found

    def points(self) -> dict[int, int]:
        """Return the fewest updates by batch, for the batches that reached the goal."""
        return {row.batch: row.best[1] for row in self.rows if row.best is not None}

    def fit(self) -> Fit | None:
        """Fit S = Smin + Emin / B to the points."""
        return fit(list(self.points()), list(self.points().values()))

    def as_json(self) -> dict[str, Any]:
        """Return all figures as JSON values."""
        found = self.fit()
        return {
            "rows": [
                {
                    "batch": row.batch,
                    "rate": row.best and row.best[0],
                    "updates": row.best and row.best[1],
                    "ratio": row.ratio,
                    "tried": [{"rate": lr, **asdict(run)} for lr, run in row.tried],
                }
                for row in self.rows
            ],
            "fit": found and asdict(found),
            "published": self.published and asdict(self.published),
        }

    def markdown(self) -> str:
        """Return the whole page."""
        theirs = ["published", "times fewer"] if self.published else []
        head = ["batch", "updates", "samples", "best lr", "times fewer", *theirs, "lr tried"]
        parts = [
            (
                f"# {self.search.recipe}: updates to {self.search.goal:.0%} validation accuracy by"
                " batch"
            ),
            f"For each batch the best of up to {self.search.num_rates} constant learning rates, one"
            " seed.",
            table(head, [_cells(row, self.published) for row in self.rows]),
            *self._fit_line(),
            *([f"Published, only the shape: {self.published.source}."] if self.published else []),
        ]
        return "\n\n".join(parts) + "\n"

    def _fit_line(self) -> list[str]:
        found = self.fit()
        if found is None:
            return []
        return [
            f"The fit S = Smin + Emin / B: Smin {found.fewest_updates:.0f} updates, Emin"
            f" {found.fewest_samples:.0f} samples, critical batch {found.critical_batch:.0f}, rms"
            f" {found.rms:.0%}."
        ]

    def draw(self, file: Path) -> None:
        """Write the plot of updates by batch, and next to it the published shape, to `file`."""
        from allstep.study.updates.plot import draw

        draw(self, file)


def _by_rate(ended: list[tuple[Trial, RunFigures]]) -> list[tuple[Trial, RunFigures]]:
    return sorted(ended, key=lambda each: float(each[0].facts["lr"]))


def _cells(row: Row, published: Published | None) -> list[str]:
    rate, updates = (
        (f"{row.best[0]:g}", str(row.best[1]))
        if row.best
        else ("-", "not reached" if row.tried else "-")
    )
    samples = str(row.best[1] * row.batch) if row.best else "-"
    tried = ", ".join(f"{lr:g}: {_how_it_ended(run)}" for lr, run in row.tried)
    theirs = []
    if published:
        ratio = published.ratio(row.before.batch, row.batch) if row.before else None
        theirs = [str(published.points.get(row.batch, "-")), _times(ratio)]
    return [str(row.batch), updates, samples, rate, _times(row.ratio), *theirs, tried]


def _how_it_ended(run: RunFigures) -> str:
    """Return the updates to the goal, or why there are none."""
    if run.reached:
        return str(run.reached.updates)
    return "not reached" if run.status == "done" else run.status


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.1f}"
