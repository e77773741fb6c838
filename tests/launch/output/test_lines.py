"""Chunks of a worker's output: as log files keep them and as a terminal shows them."""

import itertools
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allstep.launch.output import lines
from allstep.launch.output.lines import as_printed
from allstep.launch.output.writer import Output

# Mostly what matters: ends of lines, redraws, and bytes that are not UTF-8.


BYTES = st.lists(
    st.sampled_from([b"\n", b"\r", b"\r\n", b"a", b"10%", "\u00e9".encode(), b"\xe9", b"\0"]),
    max_size=40,
)


def fed(collector: lines.LineCutter, *inputs: bytes) -> list[str]:
    return [chunk for data in inputs for chunk in collector.feed(data)]


def printed(chunks: list[str]) -> str:
    return "".join(map(as_printed, chunks))


@given(BYTES, st.lists(st.integers(0, 80), max_size=6), st.floats(0.0, 2.0))
def test_chunks_are_the_stream_however_it_arrives(
    text: list[bytes], cuts: list[int], step: float
) -> None:
    data = b"".join(text)
    at = [0, *sorted(cut for cut in cuts if cut <= len(data)), len(data)]
    clock = itertools.count(0.0, step)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines, "time", SimpleNamespace(monotonic=lambda: next(clock)))
        collector = lines.LineCutter()
        chunks = fed(
            collector, *(data[start:end] for start, end in itertools.pairwise(at) if start < end)
        )
        chunks += collector.end()
    assert collector.end() == []
    assert "".join(chunks).encode(errors="surrogateescape") == data
    assert all(chunk.encode(errors="surrogateescape") for chunk in chunks)
    for chunk in chunks:
        assert as_printed(chunk).endswith("\n") or not chunk.strip("\r")
    if b"\r" not in data:
        whole = data if data.endswith(b"\n") or not data else data + b"\n"
        assert printed(chunks).encode(errors="surrogateescape") == whole


def test_redraws_of_a_progress_bar_come_at_most_once_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    bar = lines.LineCutter()
    chunks = []
    for percent in range(101):
        clock[0] += 0.05
        chunks += bar.feed(b"\r%d%%" % percent)
    chunks += bar.feed(b"\n")
    shown = printed(chunks).splitlines()
    assert shown[-1] == "100%"
    assert 4 <= len(shown) <= 7
    assert "".join(chunks) == "".join(f"\r{percent}%" for percent in range(101)) + "\n"
    assert bar.end() == []


def test_windows_line_ends_and_an_unended_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    collector = lines.LineCutter()
    assert printed(fed(collector, b"one\r\ntwo\r\n")) == "one\ntwo\n"
    clock[0] += 5.0
    assert printed(fed(collector, b"three\r", b"\nfour\r\n")) == "three\nfour\n", (
        "no empty line between them"
    )
    clock[0] += 0.5
    assert fed(collector, b"\r10%\r20%\r") == ["\r10%\r"]
    assert printed(collector.end()) == "20%\n"


def test_the_text_behind_the_last_carriage_return_is_printed() -> None:
    assert as_printed("a\rb\n") == "b\n"
    assert as_printed("a\rb\r\r\n\r\n") == "b\n\n"
    assert as_printed("10%\r20%\r") == "20%\n"
    assert as_printed("line\n\r") == "line\n"
    assert as_printed("\r") == as_printed("") == ""


def test_a_line_without_end_comes_in_chunks() -> None:
    collector = lines.LineCutter()
    chunks = fed(collector, *[b"x" * 70_000] * 40)
    assert chunks
    assert "".join(chunks + collector.end()) == "x" * 70_000 * 40


def test_a_flood_of_redraws_is_not_kept_in_memory() -> None:
    collector = lines.LineCutter()
    inputs = [b"\r" + b"x" * 9_999] * 100
    chunks = fed(collector, *inputs)
    rest = "".join(collector.end())
    assert len(rest) < 100_000
    assert "".join(chunks) + rest == b"".join(inputs).decode()


STREAM = b"one\r\n 10%\r 20%\rdone\n\x1b[1mbold\xe9\n\n 1%\r 2%"


def test_log_files_have_the_bytes_that_the_worker_wrote(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    output = Output(2, {0}, tmp_path / "logs", tmp_path / "streams")
    collector = lines.LineCutter()
    for chunk in (STREAM[:4], STREAM[4:20], STREAM[20:]):
        output.write(0, "out", collector.feed(chunk))
    output.write(0, "out", collector.end())
    assert output.write(1, "err", ["50%\rTraceback\n  line\r\n"]) == ["Traceback", "  line"]
    assert list(output.errors[1]) == ["Traceback", "  line"]
    output.close()
    assert (tmp_path / "logs/rank-0.log").read_bytes() == STREAM
    assert (tmp_path / "streams/rank.0/stdout").read_bytes() == STREAM
    assert (tmp_path / "logs/rank-1.log").read_bytes() == b"50%\rTraceback\n  line\r\n"
    shown = os.fsencode(capfd.readouterr().out)
    assert shown.startswith(b"[0] one\n[0] done\n[0] \x1b[1mbold")
    assert shown.endswith(b"\n[0] \n[0]  2%\n")
