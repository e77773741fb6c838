"""YAML that may come from another person: bounded, without aliases, every error with its line."""

import os
import time
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from allstep.errors import ConfigError
from allstep.yaml_file import MAX_BYTES, MAX_DEPTH, parse_yaml, read_yaml

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(values)
def test_plain_values_are_read_as_pyyaml_reads_them(value: object) -> None:
    """Oracle: yaml.safe_load. `Dumper` without aliases, as two equal lists may be one object."""
    dumper = type("Plain", (yaml.SafeDumper,), {"ignore_aliases": lambda self, data: True})
    text = yaml.dump(value, Dumper=dumper)
    assert parse_yaml(text, "it").value == yaml.safe_load(text)


def test_lines_of_keys() -> None:
    document = parse_yaml("a: 1\nb:\n  c: 2\n  d: [1, {e: 3}]\n", "it")
    assert document.value == {"a": 1, "b": {"c": 2, "d": [1, {"e": 3}]}}
    assert document.lines == {"a": 1, "b": 2, "b.c": 3, "b.d": 4}


def test_a_file_of_aliases_costs_nothing() -> None:
    """308 bytes that took 36 s and 416 MB."""
    levels = [f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 9)}]" for n in range(1, 9)]
    started = time.monotonic()
    with pytest.raises(ConfigError, match=r"^bomb, line 2: the alias \*l0 is not supported"):
        parse_yaml("\n".join(["l0: &l0 [x, x]", *levels]), "bomb")
    assert time.monotonic() - started < 5


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("a: 1\nb: 2\na: 3", "^f, line 3: the key a is given twice; it is on line 1 too$"),
        ("s:\n  a: 1\n  a: 1", "^f, line 3: the key s.a is given twice; it is on line 2 too$"),
        ("- {a: 1, a: 2}", "^f, line 1: the key a is given twice"),
        ("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), "^f, line 1: is nested more than 50 levels deep$"),
        ("a:\n" + "".join(f"{'  ' * n}- \n" for n in range(90)), "is nested more than 50 levels deep$"),
        ("[" * 100_000, "is nested more than 50 levels deep$"),
        ("a: [", "^f: is not YAML: "),
        ("!!python/object/apply:os.system [true]", "^f: is not YAML: "),
        ("a: 2026-13-01", "^f: holds a value that cannot be read: "),
        ("a: " + "9" * 5000, "^f: holds a value that cannot be read: "),
        ("a: 1\n---\nb: 2\n", "^f: is not YAML: "),
        ("? [a]\n: 1", "^f: is not YAML: "),
    ],
)
def test_what_is_refused(text: str, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        parse_yaml(text, "f")


def test_as_deep_as_allowed() -> None:
    assert parse_yaml("[" * MAX_DEPTH + "]" * MAX_DEPTH, "f").lines == {}


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_yaml(tmp_path / "absent.yaml")
    large = tmp_path / "large.yaml"
    large.write_bytes(b"#" * (MAX_BYTES + 1))
    with pytest.raises(ConfigError, match="larger than 1,048,576 bytes"):
        read_yaml(large)
    large.write_bytes(b"a: \xff")
    with pytest.raises(ConfigError, match="is not YAML: byte 3 is not UTF-8 text"):
        read_yaml(large)
    with pytest.raises(ConfigError, match="is not a regular file"):
        read_yaml(tmp_path)


@pytest.mark.timeout(20)
def test_a_pipe_in_place_of_a_file_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    with pytest.raises(ConfigError, match="is not a regular file"):
        read_yaml(tmp_path / "pipe.yaml")
