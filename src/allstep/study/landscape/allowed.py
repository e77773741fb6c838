"""The expected time of a survey, printed before it starts, and the refusal of too many points."""

from allstep.console.quantities import about, nbytes
from allstep.errors import ConfigError
from allstep.study.landscape.points import Grid, shown

LIMIT = 3600.0
"""Seconds that a survey may take unless the user allows more."""
# Of a saved point and of its two numbers in the result, rounded up.
_NBYTES_PER_POINT = 200


def expected_seconds(num_left: int, seconds: float, num_workers: int) -> float:
    """Return the expected time of a survey with `num_left` points of `seconds` each.

    The slowest worker has the last of each round of points.
    """
    return -(-num_left // num_workers) * seconds


def check_allowed(
    grid: Grid, num_left: int, expected: float, num_workers: int, limit: float, free: int
) -> None:
    """Raise ConfigError if the points need more time or disk space than there is.

    `expected` is the time in seconds, `limit` the allowed one, `free` the free bytes of the disk.
    """
    workers = f"{num_workers} worker{'' if num_workers == 1 else 's'}"
    takes = (
        f"--points {shown(grid)}: {num_left:,} evaluations take about {about(expected)} with"
        f" {workers}"
    )
    if expected > limit:
        raise ConfigError(
            f"{takes}, more than the {about(limit)} allowed; choose fewer --points or --samples,"
            " more --workers, or a larger --limit"
        )
    if num_left * _NBYTES_PER_POINT > free:
        raise ConfigError(
            f"{takes} and {nbytes(num_left * _NBYTES_PER_POINT)} of disk space, of which"
            f" {nbytes(free)} are free; choose fewer --points, or make room"
        )
