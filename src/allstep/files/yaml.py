"""YAML as configs use it: mappings, lists and plain values. Only this module loads YAML.

A config may be untrusted, so a file is checked before it is turned into values:

| refused | reason |
|---|---|
| more than 1 MB | no config is that long |
| aliases (`*name`) | a few hundred bytes of them expand to gigabytes |
| tags (`!!timestamp x`) | they construct objects, or end in an error of the loader's own |
| more than 50 levels | readers of the result recurse |
| a key twice in one mapping | YAML's loaders keep the last one silently |
| the merge key (`<<`) | it sets keys that are not written in the file and have no line |
| numbers to the base 60 (`1:2:3`) | YAML 1.1 reads 3723, where the author means a time or a text |
| numbers of more than 100 characters | Python refuses to print those of thousands of digits |

Errors are `ConfigError`s with the file and the line.
"""

import errno
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from allstep.errors import ConfigError, cut
from allstep.files.bounded import read_regular

MAX_BYTES = 1 << 20
MAX_DEPTH = 50
MAX_DIGITS = 100

_MERGE = "tag:yaml.org,2002:merge"
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
# libyaml's loader, if PyYAML has it, is ten times as fast.
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class Document(NamedTuple):
    """The contents of a YAML text."""

    value: Any
    lines: Mapping[str, int]
    """Line number, from 1, of each key of a mapping, by full name ("optimizer.lr")."""


def read_yaml(path: Path) -> Document:
    """Load a YAML file.

    Raises ConfigError with its name and the line, FileNotFoundError if it does not exist.
    """
    try:
        text = read_regular(path, MAX_BYTES).decode()
    except FileNotFoundError:
        raise
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise ConfigError(
                f"{path}: is larger than {MAX_BYTES:,} bytes, the limit of a config"
            ) from error
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not YAML: byte {error.start} is not UTF-8 text") from error
    return parse_yaml(text, str(path))


def parse_yaml(text: str, name: str) -> Document:
    """Load a YAML text. `name` starts each error message."""
    loader: Any = None
    try:
        _check_events(text, name)
        loader = _Loader(text)
        node = loader.get_single_node()
        lines: dict[str, int] = {}
        _note_lines(node, "", name, lines)
        return Document(None if node is None else loader.construct_document(node), lines)
    except yaml.YAMLError as error:
        reason = cut(" ".join(str(error).split()), 400)
        raise ConfigError(f"{name}: is not YAML: {reason}") from error
    except (ValueError, OverflowError) as error:
        # For example a date with month 13.
        raise ConfigError(f"{name}: holds a value that cannot be read: {error}") from error
    finally:
        if loader is not None:
            loader.dispose()


def _check_events(text: str, name: str) -> None:
    """Raise ConfigError for aliases, tags and too many levels, before any value is built."""
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        mark: Any = event.start_mark
        if isinstance(event, yaml.AliasEvent):
            raise ConfigError(
                f"{name}, line {mark.line + 1}: the alias *{cut(str(event.anchor))} is not"
                " supported; write the value itself"
            )
        if (tag := getattr(event, "tag", None)) is not None:
            shown = cut(tag).replace("tag:yaml.org,2002:", "!!")
            raise ConfigError(
                f"{name}, line {mark.line + 1}: the tag {shown} is not supported; write the value"
                " itself"
            )
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > MAX_DEPTH:
            raise ConfigError(
                f"{name}, line {mark.line + 1}: is nested more than {MAX_DEPTH} levels deep"
            )


def _check_scalar(node: Any, prefix: str, name: str) -> None:
    """Raise ConfigError for a scalar whose meaning in YAML 1.1 differs from its look.

    prefix: the full name of its key, or of the mapping that it is in, and a dot.
    """
    where = f"{name}, line {node.start_mark.line + 1}{prefix and f': key {cut(prefix[:-1])}'}"
    if node.tag == _MERGE:
        raise ConfigError(f"{where}: the merge key << is not supported; write the keys themselves")
    if node.tag not in _NUMBERS:
        return
    if ":" in node.value:
        advice = "write it as a plain number, or in quotes"
        raise ConfigError(
            f"{where}: {cut(node.value)} is a number to the base 60 in YAML; {advice}"
        )
    if len(node.value) > MAX_DIGITS:
        found = f"found {len(node.value):,}: {cut(node.value, 20)}"
        raise ConfigError(f"{where}: expected a number of at most {MAX_DIGITS} characters, {found}")


def _note_lines(node: Any, prefix: str, name: str, lines: dict[str, int]) -> None:
    """Record the line of each key in `lines`; ConfigError for repeated keys and odd scalars."""
    if isinstance(node, yaml.ScalarNode):
        _check_scalar(node, prefix, name)
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            # Keys inside a list have no full name, but must not be repeated either.
            _note_lines(item, prefix, name, {})
    if not isinstance(node, yaml.MappingNode):
        return
    seen: dict[str, int] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        if isinstance(key, yaml.ScalarNode):
            _check_scalar(key, prefix, name)
            if key.value in seen:
                raise ConfigError(
                    f"{name}, line {line}: the key {cut(prefix + key.value)} is given twice; it is"
                    f" on line {seen[key.value]} too"
                )
            seen[key.value] = line
            lines[f"{prefix}{key.value}"] = line
            _note_lines(value, f"{prefix}{key.value}.", name, lines)
