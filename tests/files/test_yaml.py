"""YAML that may come from another person: bounded, without aliases, every error with its line."""

import os
import random
import time
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from allstep.errors import ConfigError
from allstep.files.yaml import MAX_BYTES, MAX_DEPTH, parse_yaml, read_yaml
from allstep.train import read_config
from support.limited_process import limited, seeds

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
        (
            "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1),
            "^f, line 1: is nested more than 50 levels deep$",
        ),
        (
            "a:\n" + "".join(f"{'  ' * n}- \n" for n in range(90)),
            "is nested more than 50 levels deep$",
        ),
        ("[" * 100_000, "is nested more than 50 levels deep$"),
        ("a: [", "^f: is not YAML: "),
        (
            "!!python/object/apply:os.system [true]",
            "^f, line 1: the tag !!python/object/apply:os.system is not supported",
        ),
        (
            "a: 1\nb: !!timestamp x",
            "^f, line 2: the tag !!timestamp is not supported; write the value itself$",
        ),
        ("a: 2026-13-01", "^f: holds a value that cannot be read: "),
        (
            "a: " + "9" * 5000,
            (
                "^f, line 1: key a: expected a number of at most 100 characters, found 5,000:"
                " 9{20}...$"
            ),
        ),
        (
            "a:\n  b: 0x" + "f" * 10000,
            "^f, line 2: key a.b: expected a number of at most 100 characters, found 10,002",
        ),
        (
            "a:\n- 0x" + "f" * 10000,
            "^f, line 2: key a: expected a number of at most 100 characters",
        ),
        ("0x" + "f" * 10000 + ": 1", "^f, line 1: expected a number of at most 100|is not YAML"),
        (
            "a: 1\n<<: {b: 1}",
            "^f, line 2: the merge key << is not supported; write the keys themselves$",
        ),
        ("a: {<<: {b: 1}}", "^f, line 1: key a: the merge key << is not supported"),
        (
            "a: 1:2:3",
            (
                "^f, line 1: key a: 1:2:3 is a number to the base 60 in YAML; write it as a plain"
                " number, or"
            ),
        ),
        ("a: [1, 1:2.5]", "^f, line 1: key a: 1:2.5 is a number to the base 60"),
        ("a: 1\n---\nb: 2\n", "^f: is not YAML: "),
        ("? [a]\n: 1", "^f: is not YAML: "),
    ],
)
def test_what_is_refused(text: str, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        parse_yaml(text, "f")


def test_what_only_looks_like_it_is_read() -> None:
    assert parse_yaml("a: '1:2:3'\nb: '<<'\nc: x:1\n'<<': 1\nd: 1e300", "f").value == {
        "a": "1:2:3",
        "b": "<<",
        "c": "x:1",
        "<<": 1,
        "d": "1e300",
    }


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


GOOD = """\
recipe: digits
epochs: 3
data:
  validation: 100
  augment: "PadAndCrop(8, pad=1)"
model: {name: lenet, options: {hidden: 32, dropout: 0.5}}
optimizer:
  name: sgd
  lr: 0.1
  betas: [0.9, 0.99]
"""
ODD = [
    *(
        "*a",
        "&a [1]",
        "!!python/object/apply:os.system [true]",
        "!!binary x",
        "<<: {a: 1}",
        "? [a]\n: 1",
        "\t",
        "\x00",
    ),
    *(
        "---\n",
        "...\n",
        "%YAML 9.9\n",
        "[" * 60,
        "{a: " * 5000,
        "9" * 5000,
        "0x" + "f" * 2000,
        ".nan",
        "-.inf",
        "1e999",
    ),
    *(
        "2026-13-01",
        "null",
        "~",
        "[]",
        "{}",
        "yes",
        "'",
        '"',
        "|\n",
        "- ",
        ": ",
        "- " * 3000,
        "\ufeff",
        "\ud7ff",
        "🙂",
    ),
    *(
        "1:2:3",
        "12345678901234567890:1",
        "!!int 'x'",
        "!!float 'x'",
        "!!timestamp 'x'",
        "!!set {a}",
        "!!omap [a: 1]",
    ),
    *(
        "-" * 3000 + "1",
        "PadAndCrop(" + "-" * 3000 + "1)",
        "PadAndCrop(" + "(" * 300 + ")",
        "recipe: null\n",
    ),
]


def bent(seed: int) -> bytes:
    """The good config with odd text put in, values replaced, or bytes damaged."""
    dice, text = random.Random(seed), GOOD
    for _ in range(dice.randint(1, 3)):
        how = dice.randrange(4)
        if how == 0:
            place = dice.randrange(len(text) + 1)
            text = text[:place] + dice.choice(ODD) + text[place:]
        elif how == 1:
            rows = text.splitlines(keepends=True)
            row = dice.randrange(len(rows))
            rows[row] = rows[row].partition(":")[0] + ": " + dice.choice(ODD) + "\n"
            text = "".join(rows)
        elif how == 2:
            begin = dice.randrange(len(text))
            text = text[:begin] + text[begin + dice.randint(1, 30) :]
        else:
            begin = dice.randrange(len(text) or 1)
            text = text[:begin] + text[begin : begin + 40] * dice.randint(2, 50) + text[begin:]
        text = text or GOOD
    data = bytearray(text.encode(errors="surrogatepass"))
    if dice.random() < 0.2:
        data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    return bytes(data)


@pytest.mark.usefixtures("processes")
@pytest.mark.soak(1)  # its count is in `seeds`
@pytest.mark.timeout(1200)
def test_whatever_is_in_a_config_is_a_config_or_one_line(tmp_path: Path) -> None:
    file, outcomes = tmp_path / "odd.yaml", tmp_path / "outcomes"

    def one(seed: int) -> None:
        file.write_bytes(bent(seed))
        outcome, text = "config", ""
        try:
            read_config(str(file))
        except ConfigError as error:
            outcome, text = "line", str(error)
        assert "\n" not in text, text
        with outcomes.open("a") as out:
            out.write(outcome + "\n")

    assert limited(one, seeds(500)) >= 500
    # Both happen: else the damage is too small or too great to show anything.
    assert {"config", "line"} == set(outcomes.read_text().split())
