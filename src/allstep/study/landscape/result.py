"""The result of a survey: RUN/landscape/around.json and line.json.

```
around.json   {"version": 1, "kind": "around", "settings": {...}, "run": "small",
               "statistics": "...", "center": {"loss": 0.0123, "accuracy": 0.996},
               "loss": [[...], ...], "accuracy": [[...], ...],     loss[i][j] at (x_i, y_j); one
                                                                   list for one direction; null: not
                                                                   finite
               "flatness": {"rises": [0.031, ...], "mean": 0.03, "std": 0.004}}
line.json     {..., "kind": "line", "runs": ["small", "large"], "loss": [...], "accuracy": [...],
               "flatness": [{...}, {...}]}                         from RUN to RUN2, both included
```

Nothing in it depends on time, machine or number of workers: equal settings give equal bytes. The
report reads it without torch, and checks it, because a run folder may come from another person.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from allstep.errors import ConfigError
from allstep.files.atomic import replace_file
from allstep.files.bounded import read_json
from allstep.study.landscape.point_file import FOLDER, Value
from allstep.study.landscape.points import (
    DISTANCE,
    MAX_POINTS,
    NUM_DIRECTIONS,
    Grid,
    Kind,
    plane_name,
)

VERSION = 1
_MAX_TEXT = 1000

Number = float | None
Values = Mapping[str, Value]


@dataclass(frozen=True)
class Flatness:
    """The rise of the loss at half the filters' norm, along several directions."""

    rises: tuple[Number, ...]

    @property
    def mean(self) -> Number:
        """Return the mean rise; None if one is not finite."""
        known = [rise for rise in self.rises if rise is not None]
        return fmean(known) if known and len(known) == len(self.rises) else None

    @property
    def std(self) -> Number:
        """Return the std over the directions; None if the mean is None."""
        known = [rise for rise in self.rises if rise is not None]
        return stdev(known) if len(known) > 1 and len(known) == len(self.rises) else None

    def plain(self) -> dict[str, Any]:
        """Return the figures as plain values."""
        return {
            "distance": DISTANCE,
            "rises": list(self.rises),
            "mean": self.mean,
            "std": self.std,
        }


@dataclass(frozen=True)
class Around:
    """The loss around the weights of a run."""

    settings: Mapping[str, Any]
    run: str
    """Name of the run's folder."""
    statistics: str
    """How running statistics were treated, as text."""
    center: Value
    grid: Grid
    losses: tuple[Number, ...]
    """Losses of the grid: those of the second direction follow each other."""
    accuracies: tuple[Number, ...]
    flatness: Flatness

    def plain(self) -> dict[str, Any]:
        """Return the content of the file."""
        return {
            **_head("around", self.settings),
            "run": self.run,
            "statistics": self.statistics,
            "center": {"loss": self.center.loss, "accuracy": self.center.accuracy},
            "loss": _table(self.losses, self.grid),
            "accuracy": _table(self.accuracies, self.grid),
            "flatness": self.flatness.plain(),
        }


@dataclass(frozen=True)
class Line:
    """The loss on the line between two runs, and the flatness of both on the same directions."""

    settings: Mapping[str, Any]
    runs: tuple[str, str]
    statistics: str
    losses: tuple[Number, ...]
    """Losses from RUN to RUN2, both included, at equal distances."""
    accuracies: tuple[Number, ...]
    flatness: tuple[Flatness, Flatness]

    def plain(self) -> dict[str, Any]:
        """Return the content of the file."""
        return {
            **_head("line", self.settings),
            "runs": list(self.runs),
            "statistics": self.statistics,
            "loss": list(self.losses),
            "accuracy": list(self.accuracies),
            "flatness": [each.plain() for each in self.flatness],
        }


def around_result(
    settings: Mapping[str, Any], run: str, statistics: str, grid: Grid, values: Values
) -> Around:
    """Return the result of the points around a run."""
    center = values["center"]
    places = _all_places(grid)
    found = [values.get(plane_name(place), center) for place in places]
    return Around(
        settings,
        run,
        statistics,
        center,
        grid,
        tuple(value.loss for value in found),
        tuple(value.accuracy for value in found),
        _flatness("flat", values, center),
    )


def line_result(
    settings: Mapping[str, Any],
    runs: tuple[str, str],
    statistics: str,
    count: int,
    values: Values,
    around: Around,
) -> Line:
    """Return the result of the points between two runs; `around` is that of the first."""
    inner = [values[f"line {number}"] for number in range(1, count - 1)]
    found = [around.center, *inner, values["second"]]
    second = _flatness("second flat", values, values["second"])
    return Line(
        settings,
        runs,
        statistics,
        tuple(value.loss for value in found),
        tuple(value.accuracy for value in found),
        (around.flatness, second),
    )


def _flatness(name: str, values: Values, center: Value) -> Flatness:
    losses = [values[f"{name} {number}"].loss for number in range(NUM_DIRECTIONS)]
    return Flatness(
        tuple(
            None if loss is None or center.loss is None else loss - center.loss for loss in losses
        )
    )


def _all_places(grid: Grid) -> list[tuple[int, ...]]:
    if len(grid) == 1:
        return [(i,) for i in range(grid[0])]
    return [(i, j) for i in range(grid[0]) for j in range(grid[1])]


def _table(numbers: Sequence[Number], grid: Grid) -> list[Any]:
    """Return the numbers of a grid, in rows if there are two directions."""
    if len(grid) == 1:
        return list(numbers)
    return [list(numbers[at : at + grid[1]]) for at in range(0, len(numbers), grid[1])]


def _head(kind: Kind, settings: Mapping[str, Any]) -> dict[str, Any]:
    return {"version": VERSION, "kind": kind, "settings": dict(settings)}


def result_file(run: Path, kind: Kind) -> Path:
    """Return the file of a result in the folder of a run."""
    return run / FOLDER / f"{kind}.json"


def write_result(run: Path, result: Around | Line) -> Path:
    """Write a result into the folder of a run and return the file."""
    kind: Kind = "around" if isinstance(result, Around) else "line"
    file = result_file(run, kind)
    try:
        replace_file(file, (json.dumps(result.plain(), indent=1) + "\n").encode())
    except OSError as error:
        raise ConfigError(f"{file}: cannot be written: {error.strerror or error}") from error
    return file


def read_around(run: Path) -> Around | None:
    """Return the landscape around a run; None if there is none.

    Raise ValueError, of one line, if the file has other content, OSError if it cannot be read.
    """
    content = _read(result_file(run, "around"))
    if content is None:
        return None
    grid, losses = _grid_of(content["loss"])
    _, accuracies = _grid_of(content["accuracy"], grid)
    center = _Content(_mapping(content["center"]))
    return Around(
        _mapping(content["settings"]),
        _text(content["run"]),
        _text(content["statistics"]),
        Value(_number(center["loss"]), _number(center["accuracy"])),
        grid,
        losses,
        accuracies,
        _read_flatness(content["flatness"]),
    )


def read_line(run: Path) -> Line | None:
    """Return the line from a run to another one; None if there is none. Raises as `read_around`."""
    content = _read(result_file(run, "line"))
    if content is None:
        return None
    grid, losses = _grid_of(content["loss"])
    _, accuracies = _grid_of(content["accuracy"], grid)
    first, second = _pair(content["runs"])
    mine, theirs = _pair(content["flatness"])
    if len(grid) != 1:
        raise ValueError("expected a list of losses")
    return Line(
        _mapping(content["settings"]),
        (_text(first), _text(second)),
        _text(content["statistics"]),
        losses,
        accuracies,
        (_read_flatness(mine), _read_flatness(theirs)),
    )


class _Content(dict[str, Any]):
    """A JSON object whose missing keys raise ValueError."""

    def __missing__(self, key: str) -> Any:
        raise ValueError(f"has no {key!r}")


def _read(file: Path) -> "_Content | None":
    try:
        content = read_json(file)
    except FileNotFoundError:
        return None
    if not isinstance(content, dict) or content.get("version") != VERSION:
        raise ValueError("is not a landscape of this version of allstep")
    return _Content(content)


def _grid_of(content: Any, expected: Grid | None = None) -> tuple[Grid, tuple[Number, ...]]:
    """Return the size of a list or table, and its numbers."""
    rows: list[Any] = content if isinstance(content, list) and content else [None]
    is_table = isinstance(rows[0], list)
    columns = len(rows[0]) if is_table else 1
    grid: Grid = (len(rows), columns) if is_table else (len(rows),)
    if min(grid) < 2 or len(rows) * columns > MAX_POINTS or grid != (expected or grid):
        raise ValueError("expected losses and accuracies of the same points")
    if is_table and not all(isinstance(row, list) and len(row) == columns for row in rows):
        raise ValueError("expected rows of the same length")
    flat = [value for row in rows for value in row] if is_table else rows
    return grid, tuple(map(_number, flat))


def _read_flatness(content: Any) -> Flatness:
    rises = _mapping(content).get("rises")
    if not isinstance(rises, list) or not 0 < len(rises) <= 1000:
        raise ValueError("expected the rises of several directions")
    return Flatness(tuple(map(_number, rises)))


def _number(value: Any) -> Number:
    if value is not None and (not isinstance(value, int | float) or isinstance(value, bool)):
        raise ValueError(f"expected a number, found {type(value).__name__}")
    return None if value is None else float(value)


def _pair(value: Any) -> list[Any]:
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError("expected a list of two, one for each run")
    return value


def _mapping(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"expected keys and values, found {type(value).__name__}")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > _MAX_TEXT:
        raise ValueError("expected a short text")
    return value
