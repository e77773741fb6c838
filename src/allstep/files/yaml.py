"""YAML as configs use it: mappings, lists and plain values. The one place in allstep that loads
YAML.

A config may come from another person, so a file is bounded before it is turned into values:

| refused | because |
|---|---|
| more than 1 MB | no config is that long |
| aliases (`*name`) | a few hundred bytes of them expand to gigabytes |
| tags (`!!timestamp x`) | they construct objects, or end in an error of the loader's own |
| more than 50 levels | readers of the result recurse |
| a key twice in one mapping | YAML's loaders keep the last one silently |
| the merge key (`<<`) | it sets keys that do not stand in the file, and have no line |
| numbers to the base 60 (`1:2:3`) | YAML 1.1 reads 3723, while the author means a time or a text |
| numbers of more than 100 characters | Python refuses to print those of thousands of digits |

Errors are `ConfigError`s that name the file and the line.
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
# libyaml's loader where PyYAML has it: ten times as fast.
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class Document(NamedTuple):
    """What a YAML text holds."""

    value: Any
    lines: Mapping[str, int]
    """By key ("optimizer.lr"): the line, from 1, on which a key of a mapping stands."""


def read_yaml(path: Path) -> Document:
    """Load a file.

    Raises ConfigError with its name and line; FileNotFoundError where there is none.
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
    """Load a text. name: the start of each error."""
    loader: Any = None
    try:
        _check_events(text, name)
        loader = _Loader(text)
        node = loader.get_single_node()
        lines: dict[str, int] = {}
        _note_lines(node, "", name, lines)
        return Document(None if node is None else loader.construct_document(node), lines)
    except yaml.YAMLError as error:
        words = cut(" ".join(str(error).split()), 400)
        raise ConfigError(f"{name}: is not YAML: {words}") from error
    except (ValueError, OverflowError) as error:
        # A date with month 13.
        raise ConfigError(f"{name}: holds a value that cannot be read: {error}") from error
    finally:
        if loader is not None:
            loader.dispose()


def _check_events(text: str, name: str) -> None:
    """ConfigError for aliases, tags and depth, before anything is built."""
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
    """ConfigError for a scalar that YAML 1.1 reads as something else than it looks like.

    prefix: the key whose value it is, or in whose mapping, and a dot.
    """
    where = f"{name}, line {node.start_mark.line + 1}{prefix and f': key {cut(prefix[:-1])}'}"
    if node.tag == _MERGE:
        raise ConfigError(f"{where}: the merge key << is not supported; write the keys themselves")
    if node.tag not in _NUMBERS:
        return
    if ":" in node.value:
        raise ConfigError(
            f"{where}: {cut(node.value)} is a number to the base 60 in YAML; write it as a plain"
            " number, or in quotes"
        )
    if len(node.value) > MAX_DIGITS:
        raise ConfigError(
            f"{where}: expected a number of at most {MAX_DIGITS} characters, found "
            f"{len(node.value):,}: {cut(node.value, 20)}"
        )


def _note_lines(node: Any, prefix: str, name: str, lines: dict[str, int]) -> None:
    """Note the line of each key; ConfigError for a key that stands twice, and for odd scalars."""
    if isinstance(node, yaml.ScalarNode):
        _check_scalar(node, prefix, name)
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            # Keys inside a list have no name of their own, but may not stand twice either.
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
