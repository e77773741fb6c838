"""Bounds of options that start threads or processes.

`--jobs 100000` would start that many threads and overload the machine before anything fails; with a
bound it is an error of one line, exit status 2. The bounds are those of a config (`data.workers`),
far above what is useful.
"""

from collections.abc import Callable

from allstep.machine import MAX_TASKS as MOST

__all__ = ["MOST", "between"]


def between(option: str, low: int, high: int) -> Callable[[int | None], int | None]:
    """Return a callback for `typer.Option` that raises ConfigError outside of `low` to `high`.

    `option` is the name of the option, for the message. None passes.
    """

    def check(value: int | None) -> int | None:
        from allstep.errors import ConfigError

        if value is not None and not low <= value <= high:
            raise ConfigError(f"{option}: expected a number from {low} to {high}, found {value}")
        return value

    return check
