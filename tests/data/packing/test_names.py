"""File and folder names are arbitrary bytes: packing keeps them, or refuses before it writes."""

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from allstep.cli.app import app
from allstep.data.opening import open_source
from allstep.data.packing.pack import pack
from allstep.data.packing.shard_plan import Options
from allstep.data.sources.tfrecord.example import decode
from allstep.errors import DataError
from allstep.train.config.data_config import DataConfig
from allstep.train.input.classes import class_names
from support.image_folders import aged, encoded
from support.tfrecord_files import read_records


def make(root: Path, folder: bytes, file: bytes, content: bytes = encoded(1)) -> Path:
    path = root / os.fsdecode(folder) / os.fsdecode(file)
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    return aged(root)


@pytest.mark.parametrize("name", [b"caf\xe9", b"two\nlines", b"car\rriage"])
def test_a_class_that_is_no_line_of_text_is_refused_first(tmp_path: Path, name: bytes) -> None:
    source = open_source(make(tmp_path / "src", name, b"a.jpg"))
    with pytest.raises(DataError, match="not one line of text in UTF-8; rename it") as caught:
        pack(source, "src", tmp_path / "out", Options("x"))
    assert repr(name) in str(caught.value) and str(caught.value).isprintable()
    assert not (tmp_path / "out").exists()


def test_training_refuses_such_a_class_too(tmp_path: Path) -> None:
    """The error comes before anything is computed or written."""
    source = open_source(make(tmp_path / "src", b"two\nlines", b"a.jpg"))
    with pytest.raises(DataError, match="not one line of text in UTF-8; rename it"):
        class_names(DataConfig(), source, [])


def test_a_folder_with_any_name_is_opened(tmp_path: Path) -> None:
    where = make(tmp_path / os.fsdecode(b"d\xff\n\x1b"), b"cat", b"a.jpg")
    (tmp_path / "cache").mkdir()
    for command in ("info", "verify", "index"):
        shown = CliRunner().invoke(app, ["data", command, str(where)])
        assert shown.exit_code == 0, shown.output
        # Long names are wrapped in a table.
        assert "d\\xff\\n\\x1b" in shown.output.replace("\n", "").replace(" ", "")


def test_a_class_in_any_script_comes_back(tmp_path: Path) -> None:
    pack(
        open_source(make(tmp_path / "src", "кот 猫".encode(), b"a.jpg")),
        "src",
        tmp_path / "out",
        Options("x"),
    )
    assert open_source(tmp_path / "out").classes == ("кот 猫",)


def test_a_files_name_is_kept_as_it_is(tmp_path: Path) -> None:
    source = open_source(make(tmp_path / "src", b"cat", b"caf\xe9.jpg"))
    pack(source, "src", tmp_path / "out", Options("x"), strict=True)
    (record,) = read_records((tmp_path / "out" / "x-00000-of-00001.tfrecord").read_bytes())
    assert decode(record)["filename"] == [b"caf\xe9.jpg"]


def test_info_and_verify_show_names_that_are_no_text(tmp_path: Path) -> None:
    make(tmp_path / "src", b"caf\xe9", b"\xff.jpg")
    shown = CliRunner().invoke(app, ["data", "info", str(tmp_path / "src")])
    assert shown.exit_code == 0, shown.output
    assert "caf\\xe9" in shown.stdout
    make(tmp_path / "bad", b"caf\xe9", b"\xff.jpg", b"no image")
    shown = CliRunner().invoke(app, ["data", "verify", str(tmp_path / "bad")])
    assert shown.exit_code == 1, shown.output
    assert "\\xff.jpg" in shown.stdout


def test_info_and_verify_obey_nothing_in_a_name(tmp_path: Path) -> None:
    hostile, harmless = "e\x1b[31m\u202e\x9b[red]", r"e\x1b[31m\u202e\x9b[red]"
    make(tmp_path / "src", hostile.encode(), f"{hostile}.jpg".encode(), b"no image")
    for command, code in ("info", 0), ("verify", 1):
        shown = CliRunner().invoke(
            app, ["data", command, str(tmp_path / "src")], env={"COLUMNS": "200"}
        )
        assert shown.exit_code == code, shown.output
        assert harmless in shown.stdout
        assert not set("\x1b\u202e\x9b") & set(shown.stdout)
