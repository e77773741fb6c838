"""Files that are replaced: whole, with the right permissions, and through no link."""

import errno
import os
from pathlib import Path

import pytest

from allstep.files.atomic import create_file, remove_leftovers, replace_file, write_atomic


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
    for name in (".file.part", f".file.{'00' * 4}.part"):
        (tmp_path / name).symlink_to(precious)
    with pytest.raises(FileExistsError):
        replace_file(file, b"newer")
    assert precious.read_text() == "precious" and file.read_bytes() == b"new"


def test_a_failure_leaves_what_was_there(tmp_path: Path) -> None:
    folder = tmp_path / "file"
    (folder / "inside").mkdir(parents=True)
    with pytest.raises(OSError, match="irectory"):
        replace_file(folder, b"new")
    assert sorted(os.listdir(tmp_path)) == ["file"]


def test_an_error_leaves_nothing(tmp_path: Path) -> None:
    def half() -> None:
        with write_atomic(tmp_path / "file") as file:
            file.write(b"half")
            assert os.listdir(tmp_path) == [".file.part"]
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        half()
    assert os.listdir(tmp_path) == []


def test_two_writers_at_once(tmp_path: Path) -> None:
    with (
        write_atomic(tmp_path / "file") as first,
        write_atomic(tmp_path / "file", sync=True) as second,
    ):
        first.write(b"first")
        second.write(b"second")
        assert len(os.listdir(tmp_path)) == 2
        remove_leftovers(tmp_path)  # both have an owner
        assert len(os.listdir(tmp_path)) == 2
    assert os.listdir(tmp_path) == ["file"]
    assert (tmp_path / "file").read_bytes() == b"first"


def test_what_a_kill_left_makes_way(tmp_path: Path) -> None:
    for name in (".file.part", ".file.00112233.part", ".other.part"):
        (tmp_path / name).write_bytes(b"left")
    replace_file(tmp_path / "file", b"new")
    assert sorted(os.listdir(tmp_path)) == [".other.part", "file"]
    remove_leftovers(tmp_path)
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("links", [True, False])
def test_a_new_file_does_not_replace_other_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    def no_links(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "no links here")

    if links:
        assert create_file(tmp_path / "file", b"one")
        assert not create_file(tmp_path / "file", b"two")
    else:
        monkeypatch.setattr(os, "link", no_links)
        assert create_file(tmp_path / "file", b"one")
    assert (tmp_path / "file").read_bytes() == b"one"
    assert os.listdir(tmp_path) == ["file"]
