"""Series of values over a run, from which the curves are drawn.

The record of a run that was killed and resumed has some steps twice: those after the checkpoint
from which it resumed. Only the last record of a step counts (`kept`). Its clock is split at every
start, so that hours between a kill and the resume are not time of the run (`Clock`).

The x of most curves is the epoch: samples seen / samples of the training split. So runs with
different batches and numbers of workers share one axis.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from allstep.runlog import Fields, RunRecord, kept, number


@dataclass(frozen=True)
class Series:
    """Points of a curve in the order of x."""

    x: tuple[float, ...] = ()
    y: tuple[float, ...] = ()

    def __len__(self) -> int:
        return len(self.x)


def steps(record: RunRecord) -> list[Fields]:
    """Return the step lines, each step once."""
    return kept(record.steps)


def validations(record: RunRecord) -> list[Fields]:
    """Return the evaluations of the validation split, each once."""
    return kept(line for line in record.evals if line.get("part") == "validation")


def counts(lines: Sequence[Fields]) -> list[float]:
    """Return the samples of each step line since the previous line."""
    return [line["samples"] - (lines[i - 1]["samples"] if i else 0) for i, line in enumerate(lines)]


def whole(lines: Sequence[Fields]) -> list[Fields]:
    """Return the lines without short ones at the ends of epochs, whose few samples are noisy."""
    sizes = counts(lines)
    usual = median(sizes) if sizes else 0
    return [line for line, size in zip(lines, sizes, strict=True) if size >= usual / 2]


def samples_per_epoch(record: RunRecord) -> float | None:
    """Return the number of training samples; None if unknown."""
    data = record.start.get("data")
    found = number(data, "train") if isinstance(data, dict) else None
    return found if found and found > 0 else None


def over_epochs(record: RunRecord, lines: Sequence[Fields], key: str) -> Series:
    """Return the values of `key` by epoch, or by samples if the size of the split is unknown."""
    scale = samples_per_epoch(record) or 1.0
    points = [
        (line["samples"] / scale, value)
        for line in lines
        if (value := number(line, key)) is not None
    ]
    return _series(points)


def over_seconds(record: RunRecord, lines: Sequence[Fields], key: str) -> Series:
    """Return the values of `key` by seconds of the run."""
    clock = Clock(record)
    return _series(
        [(clock(line["time"]), value) for line in lines if (value := number(line, key)) is not None]
    )


def throughput(record: RunRecord, bins: int = 60) -> Series:
    """Return samples per second by seconds of the run, averaged over at most `bins` intervals."""
    lines = steps(record)
    usual, clock = median(counts(lines) or [0.0]), Clock(record)
    measured = [
        (clock(line["time"]), size, spent)
        for line, size in zip(lines, counts(lines), strict=True)
        if size >= usual / 2 and (spent := number(line, "seconds"))
    ]
    points = []
    for group in groups(len(measured), bins):
        samples, spent = sum(measured[i][1] for i in group), sum(measured[i][2] for i in group)
        points.append((measured[group[-1]][0], samples / spent))
    return _series(points)


def world_changes(record: RunRecord) -> tuple[tuple[float, str], ...]:
    """Return seconds of the run and text of each change of the workers of an elastic run."""
    clock = Clock(record)
    return tuple((clock(line["time"]), str(line.get("text"))) for line in change_lines(record))


def change_lines(record: RunRecord) -> list[Fields]:
    """Return the events about changes of the workers, without the totals at the end of the run."""
    lines = [line for line in record.events if number(line, "gap") is not None]
    return [line for line in lines if not line.get("total")]


class Clock:
    """Converts the time of a line to seconds of the run, without pauses before resumes."""

    def __init__(self, record: RunRecord) -> None:
        times = sorted(record.times)
        self.starts = sorted(line["time"] for line in record.starts)
        self.before = [0.0]
        for start, following in zip(self.starts, self.starts[1:], strict=False):
            last = max(time for time in times if time < following) if following > start else start
            self.before.append(self.before[-1] + last - start)

    def __call__(self, time: float) -> float:
        part = max(0, bisect_right(self.starts, time) - 1)
        return float(self.before[part] + max(0.0, time - self.starts[part]))


def thinned(series: Series, most: int = 240) -> Series:
    """Return at most about `most` points: lowest and highest of each interval, to keep spikes."""
    if len(series) <= most:
        return series
    chosen: list[int] = []
    for group in groups(len(series), most // 2):
        chosen += sorted(
            {min(group, key=series.y.__getitem__), max(group, key=series.y.__getitem__)}
        )
    return Series(tuple(series.x[i] for i in chosen), tuple(series.y[i] for i in chosen))


def smoothed(series: Series, most: int = 120) -> Series:
    """Return the means over intervals, at most `most` points."""
    if len(series) <= most:
        return series
    intervals = list(groups(len(series), most))
    x, y = (
        tuple(fmean(values[i] for i in each) for each in intervals)
        for values in (series.x, series.y)
    )
    return Series(x, y)


def groups(length: int, most: int) -> Iterable[range]:
    """Return at most `most` ranges of about equal length that cover `length` indices."""
    number = min(length, most)
    return (range(length * i // number, length * (i + 1) // number) for i in range(number))


def _series(points: Sequence[tuple[float, float]]) -> Series:
    return Series(tuple(x for x, _ in points), tuple(y for _, y in points))
