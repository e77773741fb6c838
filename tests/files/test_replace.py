"""Files that are replaced: whole, with the right permissions, and through no link."""

import os
from pathlib import Path

import pytest

from allstep.files.replace import replace_file


def test_the_file_is_replaced(tmp_path: Path) -> None:
    file = tmp_path / "file"
    replace_file(file, b"one")
    replace_file(file, b"two", 0o600)
    assert file.read_bytes() == b"two"
    assert file.stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["file"]


def test_links_are_replaced_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    precious = tmp_path / "precious"
    precious.write_text("precious")
    file = tmp_path / "file"
    file.symlink_to(precious)
    replace_file(file, b"new")
    assert not file.is_symlink() and file.read_bytes() == b"new"
    # Even who knows the temporary name cannot make us write through it.
    monkeypatch.setattr(os, "urandom", lambda size: bytes(size))
    (tmp_path / f".file.{'00' * 4}.new").symlink_to(precious)
    with pytest.raises(FileExistsError):
        replace_file(file, b"newer")
    assert precious.read_text() == "precious" and file.read_bytes() == b"new"


def test_a_failure_leaves_what_was_there(tmp_path: Path) -> None:
    folder = tmp_path / "file"
    (folder / "inside").mkdir(parents=True)
    with pytest.raises(OSError, match="irectory"):
        replace_file(folder, b"new")
    assert sorted(os.listdir(tmp_path)) == ["file"]
