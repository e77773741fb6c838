"""Coordinates of curves, which the template draws as SVG.

```
(0, 0)                             viewBox 0 0 400 234, scaled to the available width:
                                   350 points on a phone, 380 on a desktop
   LEFT                       RIGHT
    |                          |   TOP
  1 +--------------------------+
    |   .--*----*              |       y ticks left of LEFT, x ticks below BOTTOM, at round numbers
  0 +--------------------------+   BOTTOM
    0       2       4       6
```

The template clips curves at the edge of the frame. The script on the page turns coordinates back
into figures, so a chart includes the ends of its axes.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from allstep.console.quantities import figure, seconds
from allstep.study.recorded.series import Series, thinned

WIDTH, HEIGHT = 400, 234
LEFT, RIGHT, TOP, BOTTOM = 46, 392, 10, 198
_TABLE_ROWS = 12

Format = Callable[[float], str]


@dataclass(frozen=True)
class Curve:
    """One line of a chart."""

    name: str
    series: Series
    run: int = 0
    """Number of the run, which selects the color."""
    style: str = "strong"
    """"thin" for steps, "strong" (with dots) for evaluations, "line" for others."""


@dataclass(frozen=True)
class Chart:
    """Curves on the same axes."""

    title: str
    about: str
    """Description of the chart, shown below it and read by screen readers."""
    x_name: str
    curves: tuple[Curve, ...]
    kind: str = "figure"
    """Format of values: figure, percent or seconds."""
    lowest: float | None = None
    """Start of the y axis, unless it is logarithmic; None for the lowest value."""
    highest: float | None = None
    """End of the y axis, unless it is logarithmic; None for the highest value."""
    log: bool = False
    """Whether the y axis is logarithmic."""
    marks: tuple[tuple[float, str], ...] = ()
    """Values of x with a vertical line, and its text."""


@dataclass(frozen=True)
class Axis:
    """Maps values from `low` to `high` to coordinates from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False
    ticks: tuple[float, ...] = field(default=())

    def __call__(self, value: float) -> float:
        low, high, value = (
            math.log10(v) if self.log else v for v in (self.low, self.high, self._positive(value))
        )
        return self.start + (value - low) / (high - low) * (self.end - self.start)

    def _positive(self, value: float) -> float:
        return max(value, self.low / 1e3) if self.log else value


@dataclass(frozen=True)
class DrawnCurve:
    """A curve with its points as text for an SVG polyline, and its dots."""

    curve: Curve
    points: str
    dots: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class DrawnChart:
    """A chart with all coordinates and texts that the template needs."""

    chart: Chart
    x: Axis
    y: Axis
    x_ticks: tuple[tuple[float, str], ...]
    y_ticks: tuple[tuple[float, str], ...]
    curves: tuple[DrawnCurve, ...]
    table: tuple[tuple[str, ...], ...]
    marks: tuple[tuple[float, str], ...] = ()


def draw(chart: Chart) -> DrawnChart | None:
    """Return the coordinates of `chart`; None if none of its curves has a point."""
    curves = [curve for curve in chart.curves if len(curve.series)]
    if not curves:
        return None
    x, y = _x_axis(chart, curves), _y_axis(chart, curves)
    write = writer(chart.kind)
    return DrawnChart(
        chart=chart,
        x=x,
        y=y,
        x_ticks=tuple((_rounded(x(tick)), _x_text(chart, tick)) for tick in x.ticks),
        y_ticks=tuple((_rounded(y(tick)), write(tick)) for tick in y.ticks),
        curves=tuple(_drawn(curve, x, y) for curve in curves),
        table=tuple(_table(curves, x, chart, write)),
        marks=tuple((_rounded(x(value)), text) for value, text in chart.marks),
    )


def writer(kind: str) -> Format:
    """Return the function that formats values of `kind` (see `Chart.kind`)."""
    return {"percent": lambda value: f"{100 * value:.4g}%", "seconds": seconds}.get(kind, _short)


def round_ticks(low: float, high: float, about: int = 5) -> tuple[float, ...]:
    """Return about `about` round numbers from `low` to `high`."""
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return tuple(round(i * step, 12) for i in range(first, last + 1))


def log_ticks(low: float, high: float) -> tuple[float, ...]:
    """Return the powers of ten from `low` to `high`, with twos and fives if they are few."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    tens = tuple(10.0**e for e in exponents if low <= 10.0**e <= high)
    if len(tens) >= 3:
        return tens
    return tuple(
        value for e in exponents for m in (1, 2, 5) if low <= (value := m * 10.0**e) <= high
    )


def time_ticks(high: float) -> tuple[float, ...]:
    """Return 0 and at most six round numbers of seconds, minutes, hours or days up to `high`."""
    minute, hour, day = 60, 3600, 86400
    rounds = (
        1,
        2,
        5,
        10,
        15,
        30,
        *(m * minute for m in (1, 2, 5, 10, 15, 30)),
        *(h * hour for h in (1, 2, 3, 6, 12)),
    )
    step = next((each for each in rounds if high / each <= 6), math.ceil(high / 6 / day) * day)
    return (
        tuple(float(i * step) for i in range(math.floor(high / step) + 1))
        if high > 3
        else round_ticks(0.0, high)
    )


def _x_axis(chart: Chart, curves: Iterable[Curve]) -> Axis:
    last = max(curve.series.x[-1] for curve in curves)
    high = last if last > 1e-9 else 1.0
    ticks = time_ticks(high) if chart.x_name == "time" else round_ticks(0.0, high, 6)
    return Axis(0.0, high, LEFT, RIGHT, ticks=ticks)


def _y_axis(chart: Chart, curves: Sequence[Curve]) -> Axis:
    values = [value for curve in curves for value in curve.series.y]
    if chart.log and min(values) > 0:
        low, high = min(values) / 1.15, max(values) * 1.15
        return Axis(low, high, BOTTOM, TOP, log=True, ticks=log_ticks(low, high))
    low = min(values) if chart.lowest is None else chart.lowest
    high = max(max(values) if chart.highest is None else chart.highest, low)
    low, high = (
        (low, high) if high > low else (low - (abs(low) / 2 or 0.5), high + (abs(high) / 2 or 0.5))
    )
    room = 0.05 * (high - low)
    low = low if chart.lowest is not None else low - room
    high = high if chart.highest is not None else high + room
    return Axis(low, high, BOTTOM, TOP, ticks=round_ticks(low, high))


def _drawn(curve: Curve, x: Axis, y: Axis) -> DrawnCurve:
    series = thinned(curve.series)
    points = [(_rounded(x(a)), _rounded(y(b))) for a, b in zip(series.x, series.y, strict=True)]
    has_dots = (curve.style == "strong" and len(points) <= 40) or len(points) == 1
    inside = tuple((a, b) for a, b in points if TOP - 1 <= b <= BOTTOM + 1) if has_dots else ()
    return DrawnCurve(curve, " ".join(f"{a:g},{b:g}" for a, b in points), inside)


def _table(
    curves: Sequence[Curve], x: Axis, chart: Chart, write: Format
) -> Iterable[tuple[str, ...]]:
    """Yield a header, then about a dozen rows with the last value of every curve up to there."""
    yield (chart.x_name, *(curve.name for curve in curves))
    positions = sorted(
        {position for curve in curves for position in curve.series.x if curve.style == "strong"}
    )
    positions = positions or sorted({position for curve in curves for position in curve.series.x})
    step = max(1, math.ceil(len(positions) / _TABLE_ROWS))
    for position in positions[::-1][::step][::-1]:
        yield (
            _x_text(chart, position),
            *(_before(curve.series, position, write) for curve in curves),
        )


def _before(series: Series, position: float, write: Format) -> str:
    values = [y for x, y in zip(series.x, series.y, strict=True) if x <= position * (1 + 1e-9)]
    return write(values[-1]) if values else "–"


def _x_text(chart: Chart, value: float) -> str:
    return _short(value) if chart.x_name != "time" else ("0" if value == 0 else seconds(value))


def _short(value: float) -> str:
    if abs(value) >= 10_000:
        return f"{value / 1000:,.3g}k" if abs(value) < 1e6 else f"{value:.3g}"
    return figure(float(f"{value:.3g}"))


def _rounded(value: float) -> float:
    return round(min(max(value, -1e4), 1e4), 2)
