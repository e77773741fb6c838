"""Names from outside on the way to a terminal: nothing in them is obeyed, each stays one line."""

import io
import os
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from allstep.cli import main
from allstep.console.escape import escaped, escaped_block, print_line, print_notice
from allstep.console.progress_bar import _bar
from allstep.errors import DataError
from allstep.study.display import Lines, shown
from allstep.study.runner import State
from support.image_folders import make_folder
from support.ranks import clean_environment

HOSTILE = "[red]e\x1b[2J\x1b]0;t\x07vil\r\n\u202eallstep: saved\u2066\x9b\x7f\udcff\u2028[/red]"
HOSTILE_SHOWN = (
    r"[red]e\x1b[2J\x1b]0;t\x07vil\r\n\u202eallstep: saved\u2066\x9b\x7f\xff\u2028[/red]"
)


def is_safe(text: str) -> bool:
    """Whether a terminal takes `text` for plain text, by Unicode's own tables."""
    bidi = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
    return all(
        unicodedata.category(each) not in ("Cc", "Cs", "Zl", "Zp")
        and unicodedata.bidirectional(each) not in bidi
        for each in text
    )


def test_all_that_a_terminal_obeys_is_shown() -> None:
    assert not is_safe(HOSTILE)
    assert escaped(HOSTILE) == HOSTILE_SHOWN


@pytest.mark.parametrize("text", ["", "a b", "кот 猫", "é", "👩‍🔬", "می‌خواهم", "C:\\x", "[red]"])
def test_text_stays(text: str) -> None:
    assert escaped(text) == escaped_block(text) == text


@given(st.text(alphabet=st.characters(), max_size=30))
def test_any_text_becomes_one_line(text: str) -> None:
    shown = escaped(text)
    assert is_safe(shown)
    assert len(f"{shown}\n".splitlines()) == 1
    shown.encode()


def test_line_breaks_of_a_message_stay_and_no_others() -> None:
    assert (
        escaped_block("the run diverged\n  what to try:\n    a")
        == "the run diverged\n  what to try:\n    a"
    )
    assert escaped_block("a.jpg\nallstep: done\r\n  b") == "a.jpg\\nallstep: done\\r\n  b"


def test_lines_of_ours_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    print_line(HOSTILE)
    print_notice(HOSTILE)
    print_notice(HOSTILE, "allstep run")
    found = capsys.readouterr()
    assert found.out == f"{HOSTILE_SHOWN}\n"
    assert found.err == f"allstep: {HOSTILE_SHOWN}\nallstep run: {HOSTILE_SHOWN}\n"


def test_a_bar_shows_brackets_as_brackets(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`[link=...]` and `[red]` in a name are no markup, and an unbalanced tag is no error."""
    made = Console(stderr=True, force_terminal=True, width=200, color_system=None)
    monkeypatch.setattr("rich.console.Console", lambda **_: made)
    with _bar("[b]indexing") as shown:
        shown(1, 2, "[/red][link=http://x]a\x1b[2J")
    drawn = capsys.readouterr().err
    assert "[b]indexing" in drawn
    assert "[/red][link=http://x]a\\x1b[2J" in drawn


def test_a_study_shows_names_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    """Names of runs and the last lines of a failed one, in bars and in lines."""
    made = Console(stderr=True, force_terminal=True, width=200, color_system=None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stderr.isatty", lambda: True)
        patch.setattr("rich.console.Console", lambda **_: made)
        with shown(lanes=1) as callback:
            callback.state(State({}, {"[/red]a\x1b[2J": 0.5}, 1, None, at_most=False))
            assert isinstance(callback, Lines)
            callback.show("failed\n    [/b]\x1b[2J\u202e")
    Lines(1).show("failed\n    [/b]\x1b[2J\u202e")
    drawn = capsys.readouterr().err
    assert r"[/red]a\x1b[2J" in drawn
    assert drawn.count("failed\n    [/b]\\x1b[2J\\u202e\n") == 2
    assert "\u202e" not in drawn and "\x1b[2J" not in drawn


def run_main(
    monkeypatch: pytest.MonkeyPatch,
    encoding: str,
    errors: str,
    arguments: list[str],
) -> tuple[bytes, bytes]:
    """Run the command in this process; return what it wrote to standard output and error."""
    raw = [io.BytesIO(), io.BytesIO()]
    for name, stream in zip(("stdout", "stderr"), raw, strict=True):
        wrapper = io.TextIOWrapper(stream, encoding=encoding, errors=errors, write_through=True)
        monkeypatch.setattr(sys, name, wrapper)
    monkeypatch.setattr(sys, "argv", ["allstep", *arguments])
    with pytest.raises(SystemExit):
        main()
    return raw[0].getvalue(), raw[1].getvalue()


@pytest.fixture
def folder_of_cats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ALLSTEP_CACHE", str(tmp_path / "cache"))
    return make_folder(tmp_path / "кот猫")


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "shift_jis"])
def test_characters_that_the_output_lacks_are_escaped(
    folder_of_cats: Path, monkeypatch: pytest.MonkeyPatch, encoding: str, errors: str
) -> None:
    output, _ = run_main(monkeypatch, encoding, errors, ["data", "info", str(folder_of_cats)])
    text = output.decode(encoding).replace("\n", "").replace(" ", "")
    assert "кот猫".encode(encoding, "backslashreplace").decode(encoding) in text
    # Bars of a character that every encoding has.
    assert "#" * 30 in text


def test_an_error_with_characters_that_the_output_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    _, error = run_main(monkeypatch, "ascii", "strict", ["report", "нет"])
    assert error.startswith(rb"allstep: \u043d\u0435\u0442: there is no such folder")


def test_utf8_and_the_choice_of_the_user_stay(
    folder_of_cats: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    command = ["data", "info", str(folder_of_cats)]
    output, _ = run_main(monkeypatch, "utf-8", "strict", command)
    text = output.decode()
    assert "кот猫" in text.replace("\n", "").replace(" ", "") and "█" * 30 in text
    output, _ = run_main(monkeypatch, "ascii", "replace", command)
    assert b"????" in output.replace(b"\n", b"").replace(b" ", b"") and b"\\u" not in output


HOSTILE_FILE = os.fsdecode(b"[red]e\x1b[31mvil\nallstep: \xff.tfrecord")


@pytest.mark.usefixtures("processes")
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "verb",
    [
        ["data", "info"],
        ["data", "verify"],
        ["report"],
        ["train"],
        ["run", "-np", "1", "--hostfile"],
        ["run", "-np", "1", "--config-file"],
    ],
    ids=" ".join,
)
def test_an_error_about_a_hostile_name_is_one_plain_line(tmp_path: Path, verb: list[str]) -> None:
    more = ["true"] if verb[0] == "run" else []
    command = [sys.executable, "-m", "allstep", *verb, tmp_path / HOSTILE_FILE, *more]
    done = subprocess.run(command, capture_output=True, env=clean_environment(), timeout=100)
    shown = done.stderr.decode()
    assert done.returncode == 2, shown
    assert is_safe(shown.removesuffix("\n")), shown
    assert r"[red]e\x1b[31mvil\nallstep: \xff.tfrecord" in shown


def test_errors_themselves_keep_the_name() -> None:
    """A program that catches an error gets the name as it is; escaping is for people."""
    assert str(DataError(HOSTILE)) == HOSTILE
