"""Add horovodrun's flags to a verb, from the table in `flags_table`.

They are many, and users of horovodrun know them, so they are hidden from the verb's help.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import typer

from allstep.cli.horovod.flags_table import FLAGS, Flag


def takes_horovod_flags(verb: Callable[..., None]) -> Callable[..., None]:
    """Return the verb with horovodrun's flags added to its own options.

    The verb receives the given flags as one dictionary, `horovod`, from name to value.
    """
    own = inspect.signature(verb)

    @functools.wraps(verb)
    def with_flags(**values: Any) -> None:
        given = {flag.name: values.pop(flag.name) for flag in FLAGS}
        verb(**values, horovod={name: value for name, value in given.items() if value is not None})

    kept = [parameter for name, parameter in own.parameters.items() if name != "horovod"]
    signature = own.replace(parameters=[*kept, *map(_parameter, FLAGS)])
    # typer reads the signature; mypy does not know this attribute of functions.
    with_flags.__signature__ = signature  # type: ignore[attr-defined]
    return with_flags


def _parameter(flag: Flag) -> inspect.Parameter:
    """Return the flag as a hidden keyword parameter for typer."""
    option = typer.Option(None, *flag.spelled, hidden=True)
    return inspect.Parameter(
        flag.name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=flag.kind | None
    )
