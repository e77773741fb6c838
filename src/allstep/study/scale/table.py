"""Results of a scaling study: speed by number of workers, its prediction, and where it is lost.

Ratios of speed are taken within a round, since the machine's speed changes from minute to minute;
the table has their median. Parts of a step are means over the rounds, so that they add up.

With strong scaling N workers would ideally take 1/N of one worker's step, with weak scaling as long
as one. The loss is the measured step less that, part by part.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean, median, mode
from typing import Any

from allstep.console.markdown_table import table
from allstep.console.quantities import seconds
from allstep.runlog import RunRecord
from allstep.study.results import figures
from allstep.study.scale.explain import explain
from allstep.study.scale.parts import PARTS, MeasuredStep, measured_step
from allstep.study.scale.row_prediction import KnownRow, RowForecast, Setup, forecast
from allstep.study.scale.study import ScaleRounds
from allstep.study.trial import Outcome, Results


@dataclass(frozen=True)
class ScaleRow:
    """A number of workers: the mean step of each round that was measured, by round."""

    workers: int
    hosts: int
    steps: Mapping[int, MeasuredStep]
    tests: tuple[float, ...] = ()
    """Test accuracies of whole runs."""
    whole: tuple[float, ...] = ()
    """Seconds of whole runs, from their first line to their end."""

    @property
    def speeds(self) -> list[float]:
        """Samples per second of each round."""
        return [each.samples_per_second for each in self.steps.values()]

    @cached_property
    def mean(self) -> MeasuredStep:
        """The mean over the rounds."""
        found = list(self.steps.values())
        late = mode(each.late for each in found)
        return MeasuredStep(
            found[0].samples,
            fmean(each.seconds for each in found),
            {name: fmean(each.parts[name] for each in found) for name in PARTS},
            late,
            fmean(each.lateness for each in found),
            fmean(each.jitter for each in found),
        )

    @property
    def known(self) -> KnownRow:
        """The row as a prediction of later rows uses it."""
        return KnownRow(self.workers, self.hosts, self.mean)


@dataclass(frozen=True)
class LostTime:
    """Seconds of a step beyond those of an ideal one, by part; they add up to `seconds`."""

    ideal: float
    step: float
    parts: Mapping[str, float]

    @property
    def seconds(self) -> float:
        """The whole loss."""
        return self.step - self.ideal


@dataclass(frozen=True)
class ScaleTable:
    """All rows of a scaling study."""

    grid: ScaleRounds
    results: Results
    num_train: int
    """Samples of an epoch."""

    @cached_property
    def rows(self) -> list[ScaleRow]:
        """The rows with at least one measured round."""
        found = [self._row(workers) for workers in self.grid.workers]
        return [row for row in found if row.steps]

    def _row(self, workers: int) -> ScaleRow:
        grid = self.grid
        ended = {
            round_: self.results[name]
            for round_ in range(grid.rounds)
            if (name := grid.name(workers, round_)) in self.results
        }
        good = {round_: each for round_, each in ended.items() if each.status != "failed"}
        batch = grid.batch_of(workers)
        steps = {round_: measured_step(each.record, batch) for round_, each in good.items()}
        done = [each for each in good.values() if each.status == "done"] if grid.full else []
        return ScaleRow(
            workers,
            grid.num_hosts(workers),
            {round_: step for round_, step in steps.items() if step is not None},
            tuple(test for each in done if (test := _test(each, batch)) is not None),
            tuple(_whole(each.record) for each in done),
        )

    @property
    def base(self) -> ScaleRow:
        """The row that the others are compared with: the fewest workers."""
        return self.rows[0]

    def ratios(self, row: ScaleRow) -> list[float]:
        """Return the speed as a multiple of the base's, of each round that has both."""
        both = row.steps.keys() & self.base.steps.keys()
        return [
            row.steps[each].samples_per_second / self.base.steps[each].samples_per_second
            for each in sorted(both)
        ]

    def efficiency(self, row: ScaleRow) -> float | None:
        """Return the ratio of speeds divided by that of the numbers of workers."""
        ratios = self.ratios(row)
        return median(ratios) * self.base.workers / row.workers if ratios else None

    def loss(self, row: ScaleRow) -> LostTime:
        """Return where the step of a row loses time against an ideal one."""
        base = self.base.mean
        part = 1.0 if self.grid.per_worker else self.base.workers / row.workers
        parts = {name: row.mean.parts[name] - part * base.parts[name] for name in PARTS}
        return LostTime(part * base.seconds, row.mean.seconds, parts)

    @cached_property
    def forecasts(self) -> dict[int, RowForecast]:
        """The prediction of each row from the rows before it, by number of workers."""
        setup = Setup(self._nbytes(), self.num_train, self.grid.per_host, self.grid.link)
        before: list[KnownRow] = []
        found: dict[int, RowForecast] = {}
        for row in self.rows:
            guess = forecast(before, setup, row.workers, row.mean.samples)
            if guess is not None:
                found[row.workers] = guess
            before.append(row.known)
        return found

    def _nbytes(self) -> float:
        """Return the bytes of all gradients, from the record of any run."""
        for each in self.results.values():
            if isinstance(found := each.record.start.get("bytes"), int | float) and found > 0:
                return float(found)
        return 0.0

    def error(self, row: ScaleRow) -> float | None:
        """Return predicted over measured speed, less 1; None without a prediction."""
        guess = self.forecasts.get(row.workers)
        return None if guess is None else guess.samples_per_second / median(row.speeds) - 1

    def draw(self, file: Path) -> None:
        """Write the plots of speed and of the parts of a step to `file`."""
        from allstep.study.scale.speed_plots import draw

        draw(self, file)

    def as_json(self) -> dict[str, Any]:
        """Return all figures as JSON values."""
        scaling = "weak" if self.grid.per_worker else "strong"
        return {"scaling": scaling, "rows": [self._row_as_json(row) for row in self.rows]}

    def _row_as_json(self, row: ScaleRow) -> dict[str, Any]:
        loss, guess = self.loss(row), self.forecasts.get(row.workers)
        return {
            "workers": row.workers,
            "hosts": row.hosts,
            "batch": row.mean.samples,
            "samples_per_second": row.speeds,
            "epoch_seconds": self.num_train / median(row.speeds),
            "ratios": self.ratios(row),
            "efficiency": self.efficiency(row),
            "predicted": None if guess is None else guess.samples_per_second,
            "prediction_error": self.error(row),
            "prediction_knows": None if guess is None else guess.known,
            "expected_error": None if guess is None else guess.expected_error,
            "step": row.mean.seconds,
            "parts": dict(row.mean.parts),
            "ideal_step": loss.ideal,
            "loss": dict(loss.parts),
            "late_rank": row.mean.late,
            "lateness": row.mean.lateness,
            "test_accuracies": list(row.tests),
            "run_seconds": list(row.whole),
        }

    def markdown(self) -> str:
        """Return the whole page."""
        grid = self.grid
        if not self.rows:
            return f"# {grid.recipe}: no number of workers was measured\n"
        kind = (
            f"weak scaling, {grid.batch} samples per worker"
            if grid.per_worker
            else f"strong scaling, batch {grid.batch}"
        )
        parts = [
            f"# {grid.recipe}: {kind}",
            self._about(),
            table(self._head(), [self._cells(row) for row in self.rows]),
            *self._knowledge(),
            "## Where the time of a step goes",
            "ms of a step; the parts after the ideal step are what N workers lose, and add up.",
            table(["workers", "ideal", *PARTS, "step"], [self._lost(row) for row in self.rows]),
            *[explain(row.workers, row.mean, self.loss(row).parts) for row in self.rows[1:]],
        ]
        return "\n\n".join(parts) + "\n"

    def _about(self) -> str:
        rounds = min(len(row.steps) for row in self.rows)
        count = "1 round" if rounds == 1 else f"{rounds} rounds"
        first = self.base.workers
        against = "one worker" if first == 1 else f"{first} workers"
        return (
            f"{count}; in each, every number of workers runs once in a world of its own. `times` is"
            f" the speed as a multiple of {against}: the median of the ratios within a round, and"
            " the lowest and highest. The prediction is made from the rows above it."
        )

    def _head(self) -> list[str]:
        whole = ["test accuracy", "run"] if self.grid.full else []
        hosts = ["hosts"] if self.grid.hosts else []
        heads = ["samples/s", "epoch", "times", "efficiency", "predicted", "error", *whole]
        return ["workers", *hosts, *heads]

    def _cells(self, row: ScaleRow) -> list[str]:
        ratios, speed = self.ratios(row), median(row.speeds)
        guess, error, efficiency = (
            self.forecasts.get(row.workers),
            self.error(row),
            self.efficiency(row),
        )
        times = f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else "-"
        return [
            str(row.workers),
            *([str(row.hosts)] if self.grid.hosts else []),
            _speed(speed),
            seconds(self.num_train / speed),
            times,
            "-" if efficiency is None else f"{efficiency:.0%}",
            "-" if guess is None else _speed(guess.samples_per_second),
            "-" if error is None else f"{error:+.1%}",
            *(self._whole(row) if self.grid.full else []),
        ]

    def _whole(self, row: ScaleRow) -> list[str]:
        test = f"{fmean(row.tests):.2%}" if row.tests else "-"
        return [test, seconds(fmean(row.whole)) if row.whole else "-"]

    def _knowledge(self) -> list[str]:
        """Return a line for each prediction: what was known, and the error to expect."""
        return [
            f"Prediction for {workers} workers: from {guess.known}; error to expect:"
            f" {guess.expected_error}."
            for workers, guess in self.forecasts.items()
        ]

    def _lost(self, row: ScaleRow) -> list[str]:
        loss = self.loss(row)
        figures: Sequence[float] = [loss.ideal, *(loss.parts[name] for name in PARTS), loss.step]
        return [str(row.workers), *(f"{1e3 * each:.2f}" for each in figures)]


def _speed(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _test(outcome: Outcome, batch: int) -> float | None:
    return figures(outcome, batch, None).test


def _whole(record: RunRecord) -> float:
    """Return the seconds from the start line of a run to its end."""
    return float(record.ends[-1]["time"] - record.starts[0]["time"])
