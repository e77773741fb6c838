"""The points of a landscape: which weights are evaluated, and the name of each.

```
center          the weights of RUN
flat 0 .. 9     RUN + 0.5 x direction k                 half the filters' norm, for the flatness
plane i j       RUN + x_i d_0 + y_j d_1                 --points 25x25; `plane i` for --points 25

second          the weights of RUN2
second flat k   RUN2 + 0.5 x direction k                the same random numbers as for RUN
line i          RUN + t_i (RUN2 - RUN)                  t from 0 to 1
```

The points of RUN are one survey ("around"), those with RUN2 another one ("line"). Coordinates are
in norms of the filters: at 1, each filter is moved by its own norm. The point (0, 0) of the grid is
the center and not evaluated twice.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Literal

from allstep.errors import ConfigError

MAX_POINTS = 1_000_000
"""Largest number of points of a grid."""

NUM_DIRECTIONS = 10
"""Directions of the flatness figure; the first two are those of the grid."""
DISTANCE = 0.5
"""Length of the steps of the flatness figure, in norms of the filters."""

Grid = tuple[int, ...]
"""Number of points along the first and, with two directions, the second direction."""
Base = Literal["first", "second", "line"]
Kind = Literal["around", "line"]


@dataclass(frozen=True)
class Point:
    """Weights to evaluate: those of a run or of the line between two, and steps from there."""

    name: str
    base: Base
    steps: tuple[tuple[int, float], ...] = ()
    """Numbers of directions, each with the length of the step in norms of the filters."""
    part: float = 0.0
    """On the line: the part of the way from RUN to RUN2."""


def parse_points(text: str) -> Grid:
    """Return the grid of "25x25" (two directions) or "25" (one); ConfigError for other texts."""
    if not re.fullmatch(r"[0-9]{1,9}(x[0-9]{1,9})?", text):
        raise ConfigError(f"--points: expected 25x25, or 25 for one direction, found {text!r}")
    grid = tuple(map(int, text.split("x")))
    if min(grid) < 3:
        raise ConfigError(f"--points: expected at least 3 points along a direction, found {text}")
    if prod(grid) > MAX_POINTS:
        raise ConfigError(f"--points: expected at most {MAX_POINTS:,} points, found {text}")
    return grid


def shown(grid: Grid) -> str:
    """Return the grid as the user writes it."""
    return "x".join(map(str, grid))


def coordinate(number: int, count: int) -> float:
    """Return the place of a point along a direction: -1 for the first, 1 for the last.

    The middle one of an odd number is exactly 0.
    """
    return (2 * number - (count - 1)) / (count - 1)


def coordinates(count: int) -> list[float]:
    """Return the places of all points along a direction."""
    return [coordinate(number, count) for number in range(count)]


def num_points(kind: Kind, grid: Grid) -> int:
    """Return the number of points of a survey without listing them: there may be billions."""
    extra = 1 + NUM_DIRECTIONS
    if kind == "line":
        return extra + grid[0] - 2
    has_center = all(count % 2 for count in grid)
    return extra + prod(grid) - has_center


def points(kind: Kind, grid: Grid) -> Iterator[Point]:
    """Yield the points of a survey."""
    yield from _around(grid) if kind == "around" else _line(grid[0])


def _around(grid: Grid) -> Iterator[Point]:
    yield Point("center", "first")
    yield from _flat("flat", "first")
    for place in _places(grid):
        steps = tuple(enumerate(map(coordinate, place, grid)))
        if any(length for _, length in steps):
            yield Point(plane_name(place), "first", steps)


def plane_name(place: tuple[int, ...]) -> str:
    """Return the name of the point at a place of the grid."""
    return " ".join(["plane", *map(str, place)])


def _places(grid: Grid) -> Iterator[tuple[int, ...]]:
    """Yield the places of the grid; `itertools.product` would list both ranges first."""
    for i in range(grid[0]):
        if len(grid) == 1:
            yield (i,)
        else:
            yield from ((i, j) for j in range(grid[1]))


def _flat(name: str, base: Base) -> Iterator[Point]:
    for number in range(NUM_DIRECTIONS):
        yield Point(f"{name} {number}", base, ((number, DISTANCE),))


def _line(count: int) -> Iterator[Point]:
    """Yield the points between two runs; its ends are the centers of both."""
    yield Point("second", "second")
    yield from _flat("second flat", "second")
    for number in range(1, count - 1):
        yield Point(f"line {number}", "line", part=number / (count - 1))
