"""Files of others: only regular ones, within limits, and never a wait."""

import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allstep.files import bounded
from allstep.files.bounded import (
    MAX_DEPTH,
    MAX_LINE,
    open_regular,
    parse_json,
    read_json,
    read_lines,
    read_regular,
)
from support.limited_process import limited
from support.special_files import ODD

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(PLAIN | st.text())
def test_plain_values_are_read_as_json_reads_them(value: Any) -> None:
    """Oracle: json.loads, with and without escapes."""
    for ascii_only in (True, False):
        text = json.dumps(value, ensure_ascii=ascii_only)
        assert parse_json(text.encode()) == json.loads(text)


def nested(levels: int) -> bytes:
    return b"[" * levels + b"]" * levels


def test_depth() -> None:
    assert parse_json(nested(MAX_DEPTH)) is not None
    assert parse_json(b"[" + b"[]," * 500 + b"[]]") == [[]] * 501


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (nested(MAX_DEPTH + 1), "nested more than 50 levels"),
        (nested(900), "nested more than 50 levels"),
        (b'{"a":' * 60 + b"1" + b"}" * 60, "nested more than 50 levels"),
        (b"[" * 1_000_000, "nested more than 50 levels"),
        (b"NaN", "holds NaN, which is not JSON"),
        (b"[-Infinity]", "holds -Infinity"),
        (b"1e999", "beyond a float"),
        (b"[18446744073709551616]", "an integer of 20 digits"),
        (b"9" * 30, "an integer of 30 digits"),
        (b"9" * 100_000, "an integer of 100000 digits"),
        (b'"\\ud800"', "surrogates not allowed"),
        (b'"\xed\xa0\x80"', "can't decode"),
        ('{"a": 1}'.encode("utf-16"), "can't decode"),
        (b"", "Expecting value"),
        (b"{", "Expecting property name"),
        (b"[1] [2]", "Extra data"),
    ],
)
def test_what_is_refused(data: bytes, error: str) -> None:
    with pytest.raises(ValueError, match=error) as caught:
        parse_json(data)
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("processes")
@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", sorted(ODD))
def test_what_is_no_file(tmp_path: Path, kind: str) -> None:
    """An OSError with a text, at once: also from reading lines, whose file may be of any size."""
    path = tmp_path / "file"
    ODD[kind](path)

    def reads(read: Callable[[Path], object]) -> None:
        text: str | None = None
        try:
            read(path)
        except OSError as error:
            text = error.strerror
        assert text or (kind == "terabyte of holes" and read is all_lines)

    limited(reads, [lambda path: read_regular(path, 1000), read_json, all_lines])


def test_a_file_that_waits_for_news(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """/proc/kmsg has the mode of a regular file; a read that would wait returns None."""
    path = tmp_path / "file"
    path.write_bytes(b"")

    class Waiting(io.BufferedReader):
        def read(self, size: int | None = -1, /) -> bytes:
            return None  # type: ignore[return-value]

    monkeypatch.setattr(bounded, "open_regular", lambda path: Waiting(io.FileIO(path)))
    with pytest.raises(BlockingIOError, match="it has no data to read yet"):
        read_regular(path, 1000)


def all_lines(path: Path) -> list[bytes]:
    return list(read_lines(path))


def test_limits_of_files(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"123456")
    assert read_regular(path, 6) == b"123456"
    with pytest.raises(OSError, match="is larger than 5 bytes"):
        read_regular(path, 5)
    link = tmp_path / "link"
    link.symlink_to(path)
    assert read_regular(link, 10) == b"123456"
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="is not a regular file"):
        open_regular(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_line_without_an_end_ends_the_reading(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"a\n\nb\n" + b"x" * MAX_LINE + b"\nc\n")
    assert all_lines(path) == [b"a\n", b"\n", b"b\n"]
    path.write_bytes(b"a\nb")
    assert all_lines(path) == [b"a\n", b"b"]
