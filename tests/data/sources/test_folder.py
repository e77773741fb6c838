"""Class folders. The reference is the tree that was made."""

import os
import pickle
from pathlib import Path

import pytest

from allstep.data.sources.folder import FolderSource
from allstep.data.sources.source import BadSample
from allstep.errors import DataError
from support.image_folders import aged


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALLSTEP_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in (
        "dog/c.jpeg",
        "cat/a.jpg",
        "cat/more/b.PNG",
        "cat/notes.txt",
        "cat/.hidden.jpg",
        ".git/x.jpg",
        "empty/readme",
    ):
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())
    return aged(tmp_path / "root")


def contents(source: FolderSource) -> list[tuple[bytes, int]]:
    return [
        (bytes(source.read(number).data), source.read(number).target)
        for number in range(len(source))
    ]


TREE = [(b"cat/a.jpg", 0), (b"cat/more/b.PNG", 0), (b"dog/c.jpeg", 1)]


def test_folders_are_classes(root: Path) -> None:
    source = FolderSource(root)
    assert contents(source) == TREE and source.classes == ("cat", "dog", "empty")
    assert source.targets().tolist() == [0, 0, 1] and source.place(2).file == str(
        root / "dog" / "c.jpeg"
    )
    assert contents(pickle.loads(pickle.dumps(source))) == TREE
    with pytest.raises(IndexError):
        source.read(3)


def test_the_second_opening_lists_nothing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FolderSource(root)
    monkeypatch.setattr("allstep.data.sources.folder._files", None)
    assert contents(FolderSource(root)) == TREE


@pytest.mark.usefixtures("processes")
def test_what_changes_is_noticed(root: Path) -> None:
    FolderSource(root)
    (root / "cat" / "more" / "new.jpg").write_bytes(b"new")
    assert len(FolderSource(root)) == 4
    (root / "cat" / "a.jpg").unlink()
    assert len(FolderSource(root)) == 3
    (root / "ant").mkdir()
    (root / "ant" / "x.jpg").write_bytes(b"x")
    assert (
        FolderSource(root).classes == ("ant", "cat", "dog", "empty")
        and len(FolderSource(root)) == 4
    )
    assert len(FolderSource(root, suffixes=(".txt",))) == 1


def test_a_file_that_is_gone_or_a_folder_is_a_bad_sample(root: Path) -> None:
    source = FolderSource(root)
    (root / "cat" / "a.jpg").unlink()
    with pytest.raises(BadSample, match="No such file") as caught:
        source.read(0)
    assert caught.value.number == 0
    (root / "cat" / "a.jpg").mkdir()
    with pytest.raises(BadSample, match="is not a regular file"):
        source.read(0)


def test_with_checksums_later_damage_is_found(root: Path) -> None:
    reported: list[int] = []
    FolderSource(root, checksum=True, progress=lambda name, done, total: reported.append(done))
    assert reported
    (root / "dog" / "c.jpeg").write_bytes(b"dog/c.jpeX")
    source = FolderSource(root)
    with pytest.raises(BadSample, match=r"expected 0x[0-9a-f]{8} as in the index"):
        source.read(2)
    assert source.read(0).target == 0


@pytest.mark.usefixtures("processes")
def test_names_that_are_not_utf8_are_read(root: Path) -> None:
    (Path(os.fsdecode(os.fsencode(root / "cat") + b"/\xff.jpg"))).write_bytes(b"odd")
    assert (b"odd", 0) in contents(FolderSource(root))


def test_a_folder_without_images_or_a_missing_one_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "root" / "cat").mkdir(parents=True)
    with pytest.raises(DataError, match="1 class folders contain no images"):
        FolderSource(aged(tmp_path / "root"))
    with pytest.raises(DataError, match="No such file"):
        FolderSource(tmp_path / "nowhere")


@pytest.mark.usefixtures("processes")
def test_a_file_that_is_replaced_is_held_against_its_checksum(root: Path) -> None:
    FolderSource(root, checksum=True)
    (root / "cat" / "a.jpg").unlink()
    (root / "cat" / "a.jpg").write_bytes(b"cat/X.jpg")
    (root / "cat" / "added.jpg").write_bytes(b"added")
    source = FolderSource(root)
    with pytest.raises(BadSample, match="changed since checksums were stored"):
        source.read(0)
    assert [bytes(source.read(number).data) for number in (1, 2, 3)] == [
        b"added",
        b"cat/more/b.PNG",
        b"dog/c.jpeg",
    ]
    FolderSource(root, again=True)
    assert bytes(FolderSource(root).read(0).data) == b"cat/X.jpg"


@pytest.mark.usefixtures("processes")
def test_another_process_does_not_number_other_files(root: Path) -> None:
    pickled = pickle.dumps(FolderSource(root))
    (root / "cat" / "notes.md").write_text("no image: nothing changes")
    assert contents(pickle.loads(pickled)) == TREE
    (root / "cat" / "a.jpg").rename(root / "cat" / "z.jpg")
    with pytest.raises(
        DataError, match="was changed after it was opened: its files have other names; start again"
    ):
        pickle.loads(pickled)
    (root / "cat" / "0.jpg").write_bytes(b"new")
    with pytest.raises(DataError, match="it had 3 images and has 4"):
        pickle.loads(pickled)


@pytest.mark.usefixtures("processes")
def test_hidden_folders_in_a_class_do_not_count(root: Path) -> None:
    (root / "cat" / ".ipynb_checkpoints").mkdir()
    (root / "cat" / ".ipynb_checkpoints" / "a-checkpoint.jpg").write_bytes(b"copy")
    assert contents(FolderSource(root)) == TREE


@pytest.mark.usefixtures("processes")
def test_files_that_may_be_meant_as_images_are_named(root: Path) -> None:
    """Such as photos of a phone; text files next to the images need no note."""
    for name in ("cat/x.HEIC", "cat/y.heic", "dog/deep/z.dng", "dog/list.json"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(b"x")
    (note,) = FolderSource(root).notes
    assert (
        "4 files are left out" in note
        and ".heic (2)" in note
        and ".dng (1)" in note
        and "none (1)" in note
    )
    assert FolderSource(root).notes == (note,)  # from the index
    for name in ("cat/x.HEIC", "cat/y.heic", "dog/deep/z.dng", "empty/readme"):
        (root / name).unlink()
    assert FolderSource(root).notes == ()
