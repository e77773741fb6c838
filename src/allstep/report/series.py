"""Values over a run: what the curves are drawn from.

A record of a run that was killed and resumed tells some steps twice: those after the checkpoint it
went on from. Only the last telling counts (`kept`). Its clock is taken apart at every start, so
that hours between a kill and the resume are not time of the run (`Clock`).

The x of most curves is the epoch, counted in samples: samples seen / samples of the training set.
So runs with different batches and numbers of workers lie on one axis.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from allstep.runlog import Fields, RunRecord, kept, number


@dataclass(frozen=True)
class Series:
    """Points in the order of x."""

    x: tuple[float, ...] = ()
    y: tuple[float, ...] = ()

    def __len__(self) -> int:
        return len(self.x)


def steps(record: RunRecord) -> list[Fields]:
    """The steps that count."""
    return kept(record.steps)


def validations(record: RunRecord) -> list[Fields]:
    """The evaluations on the validation part that count."""
    return kept(line for line in record.evals if line.get("part") == "validation")


def counts(lines: Sequence[Fields]) -> list[float]:
    """Samples of each step line: since the line before."""
    return [line["samples"] - (lines[i - 1]["samples"] if i else 0) for i, line in enumerate(lines)]


def whole(lines: Sequence[Fields]) -> list[Fields]:
    """Without the short ones at the ends of epochs, whose few samples say little."""
    sizes = counts(lines)
    usual = median(sizes) if sizes else 0
    return [line for line, size in zip(lines, sizes, strict=True) if size >= usual / 2]


def samples_per_epoch(record: RunRecord) -> float | None:
    """Of the training set; None when the record does not say."""
    data = record.start.get("data")
    found = number(data, "train") if isinstance(data, dict) else None
    return found if found and found > 0 else None


def over_epochs(record: RunRecord, lines: Sequence[Fields], key: str) -> Series:
    """The numbers under `key` by epoch (by samples where the size of the set is not known)."""
    scale = samples_per_epoch(record) or 1.0
    points = [
        (line["samples"] / scale, value)
        for line in lines
        if (value := number(line, key)) is not None
    ]
    return _series(points)


def over_seconds(record: RunRecord, lines: Sequence[Fields], key: str) -> Series:
    """The numbers under `key` by seconds of the run."""
    clock = Clock(record)
    return _series(
        [(clock(line["time"]), value) for line in lines if (value := number(line, key)) is not None]
    )


def throughput(record: RunRecord, bins: int = 60) -> Series:
    """Samples per second by seconds of the run, in bins that hold several lines when there are
    many."""
    lines = steps(record)
    usual, clock = median(counts(lines) or [0.0]), Clock(record)
    told = [
        (clock(line["time"]), size, spent)
        for line, size in zip(lines, counts(lines), strict=True)
        if size >= usual / 2 and (spent := number(line, "seconds"))
    ]
    points = []
    for group in groups(len(told), bins):
        samples, spent = sum(told[i][1] for i in group), sum(told[i][2] for i in group)
        points.append((told[group[-1]][0], samples / spent))
    return _series(points)


class Clock:
    """From the time of a line to the seconds that the run had worked by then."""

    def __init__(self, record: RunRecord) -> None:
        every = (
            record.starts,
            record.steps,
            record.evals,
            record.checkpoints,
            record.events,
            record.ends,
        )
        times = sorted(line["time"] for lines in every for line in lines)
        self.starts = sorted(line["time"] for line in record.starts)
        self.before = [0.0]
        for start, following in zip(self.starts, self.starts[1:], strict=False):
            last = max(time for time in times if time < following) if following > start else start
            self.before.append(self.before[-1] + last - start)

    def __call__(self, time: float) -> float:
        part = max(0, bisect_right(self.starts, time) - 1)
        return float(self.before[part] + max(0.0, time - self.starts[part]))


def thinned(series: Series, most: int = 240) -> Series:
    """At most about `most` points: of each stretch the lowest and the highest, so that spikes stay."""
    if len(series) <= most:
        return series
    chosen: list[int] = []
    for group in groups(len(series), most // 2):
        chosen += sorted(
            {min(group, key=series.y.__getitem__), max(group, key=series.y.__getitem__)}
        )
    return Series(tuple(series.x[i] for i in chosen), tuple(series.y[i] for i in chosen))


def smoothed(series: Series, most: int = 120) -> Series:
    """Means over stretches, at most `most` of them."""
    if len(series) <= most:
        return series
    stretches = list(groups(len(series), most))
    x, y = (
        tuple(fmean(values[i] for i in each) for each in stretches)
        for values in (series.x, series.y)
    )
    return Series(x, y)


def groups(length: int, most: int) -> Iterable[range]:
    """`length` things in at most `most` stretches of about equal length."""
    pieces = min(length, most)
    return (range(length * i // pieces, length * (i + 1) // pieces) for i in range(pieces))


def _series(points: Sequence[tuple[float, float]]) -> Series:
    return Series(tuple(x for x, _ in points), tuple(y for _, y in points))
