"""Which files are the shards of a folder."""

from pathlib import Path

import pytest

from allstep.data.sources.shards import list_shards, read_classes
from allstep.errors import DataError


def listed(where: object) -> list[str]:
    def is_shard(name: str) -> bool:
        return name.endswith((".tar", ".gz"))

    found = list_shards(where, is_shard, "tar files")  # type: ignore[arg-type]
    return [Path(each).name for each in found]


def make(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).write_bytes(b"")


def test_a_folder_without_some_of_its_shards_is_an_error(tmp_path: Path) -> None:
    make(tmp_path, "x-00000-of-00004.tar", "x-00001-of-00004.tar", "x-00003-of-00004.tar")
    with pytest.raises(
        DataError,
        match=r"1 of 4 shards are missing, the first is x-00002-of-00004\.tar; copy them, or",
    ):
        listed(tmp_path)
    # A pattern or a range reads the shards that it names.
    assert len(listed(str(tmp_path / "x-*.tar"))) == 3
    assert len(listed(str(tmp_path / "x-0000{0..1}-of-00004.tar"))) == 2
    make(tmp_path, "x-00002-of-00004.tar")
    assert len(listed(tmp_path)) == 4


@pytest.mark.parametrize(
    "names",
    [
        ["a.tar"],
        ["train-00000-of-00001.tar", "val-00000-of-00002.tar", "val-00001-of-00002.tar"],
        ["x-00000-of-00001.tar", "y-00000-of-00001.tar.gz"],
        ["x-1-of-3.tar", "part-00007.tar", "x-00000-of-00000.tar"],
    ],
)
def test_folders_that_lack_nothing(tmp_path: Path, names: list[str]) -> None:
    make(tmp_path, *names)
    assert listed(tmp_path) == sorted(names)


def test_a_number_of_shards_that_cannot_be_takes_no_time(tmp_path: Path) -> None:
    make(tmp_path, "x-0000000-of-9999999.tar")
    with pytest.raises(DataError, match="999999 of 9999999 shards are missing"):
        listed(tmp_path)


@pytest.mark.parametrize(
    "text", ["cat\n\ndog\n", "cat\n \ndog", "cat\u2028dog\n", "cat\x0bdog\n", "\ncat\n"]
)
def test_a_list_of_classes_with_an_odd_line(tmp_path: Path, text: str) -> None:
    """Every name after it would have another label."""
    (tmp_path / "classes.txt").write_text(text)
    with pytest.raises(DataError, match=r"classes\.txt, line [12]: expected the name of a class"):
        read_classes(str(tmp_path / "x.tar"))


@pytest.mark.parametrize("text", ["cat\ndog\n", "cat\ndog", "cat\r\ndog\r\n", "\ufeffcat\ndog\n"])
def test_a_list_of_classes(tmp_path: Path, text: str) -> None:
    (tmp_path / "classes.txt").write_bytes(text.encode())
    assert read_classes(str(tmp_path / "x.tar")) == (("cat", "dog"), None)
