"""Bounds of options that start threads or processes: an absurd number is one line, exit status 2.

`--jobs 100000` would start as many threads, and take the machine down before anything fails. The
bounds are those of a config (`data.workers`), far above what is useful.
"""

from collections.abc import Callable

from allstep.machine import MAX_TASKS as MOST

__all__ = ["MOST", "between"]


def between(option: str, low: int, high: int) -> Callable[[int | None], int | None]:
    """Return a callback for `typer.Option`: ConfigError unless the value is in the range."""

    def check(value: int | None) -> int | None:
        from allstep.errors import ConfigError

        if value is not None and not low <= value <= high:
            raise ConfigError(f"{option}: expected a number from {low} to {high}, found {value}")
        return value

    return check
