"""Check plain values against `RunConfig`, and list its keys.

Errors name config keys and expected values instead of pydantic's terms.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from allstep.errors import ConfigError, cut
from allstep.train.config.run_config import RunConfig


def validated(values: Mapping[str, Any], place: Callable[[str], str] = lambda key: "") -> RunConfig:
    """Return `values` as a RunConfig. Raise ConfigError for the first invalid value, in one line.

    `place` returns the prefix of the message for a key: where the key was set.
    """
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        found = error.errors()
        first = found[0]
        key = ".".join(_key_parts(first["loc"]))
        alternatives = [
            _expected(each["type"], each["msg"])
            for each in found
            if _key_parts(each["loc"]) == _key_parts(first["loc"])
        ]
        what = " or ".join(dict.fromkeys(alternatives))
        problem = f"expected {what}, found {cut(repr(first['input']))}"
        raise ConfigError(f"{place(key)}config key {cut(key)!r}: {problem}") from error


def _expected(kind: str, message: str) -> str:
    if kind == "path_type":
        return "a path"
    what = message.removeprefix("Input should be ")
    return f"a number {what}" if what.startswith(("greater", "less")) else what


def _key_parts(location: tuple[int | str, ...]) -> list[str]:
    """Return the components of a key, without those that pydantic adds for union types."""
    parts: list[str] = []
    section: Any = RunConfig
    for part in location:
        if not (isinstance(section, type) and issubclass(section, BaseModel)):
            break
        parts.append(str(part))
        section = (
            section.model_fields[str(part)].annotation
            if str(part) in section.model_fields
            else None
        )
    return parts


def known_keys(section: type[BaseModel] = RunConfig, prefix: str = "") -> Iterator[str]:
    """Yield all keys of a config; a key in a section has a dot: "optimizer.lr"."""
    for name, field in section.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from known_keys(inner, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"
