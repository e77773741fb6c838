"""Gives a verb horovodrun's flags, made from the table in `flags_table`.

They are many, and those who need them know them: they work, and stay out of the verb's help.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import typer

from allstep.cli.horovod.flags_table import FLAGS, Flag


def takes_horovod_flags(verb: Callable[..., None]) -> Callable[..., None]:
    """The verb with these flags added to its own; their values reach it as one dictionary,
    `horovod`, of those that were given."""
    own = inspect.signature(verb)

    @functools.wraps(verb)
    def with_flags(**values: Any) -> None:
        given = {flag.name: values.pop(flag.name) for flag in FLAGS}
        verb(**values, horovod={name: value for name, value in given.items() if value is not None})

    kept = [parameter for name, parameter in own.parameters.items() if name != "horovod"]
    with_flags.__signature__ = own.replace(parameters=[*kept, *map(_parameter, FLAGS)])  # type: ignore[attr-defined]
    return with_flags


def _parameter(flag: Flag) -> inspect.Parameter:
    option = typer.Option(None, *flag.spelled, hidden=True)
    return inspect.Parameter(
        flag.name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=flag.kind | None
    )
