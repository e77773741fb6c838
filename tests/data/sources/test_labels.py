"""Labels that are stored as text.

The reference is the rule: an integer in every record is the number, other text a name.
"""

import io
import json
import pickle
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from allstep.data import Loader
from allstep.data.inspect.verify import verify
from allstep.data.opening import open_source
from allstep.data.sources import index as index_module
from allstep.data.sources import unpack
from allstep.data.sources.index import index_places, read_index
from allstep.data.sources.labels import (
    INTEGERS,
    NAMES,
    NUMBERS,
    Labeling,
    StoredLabels,
    Tally,
    decide,
    text_of,
)
from allstep.data.sources.source import BadSample, Source
from allstep.data.sources.tar.source import TarSource
from allstep.data.sources.tfrecord import labels as record_labels
from allstep.data.sources.tfrecord.example import encode
from allstep.data.sources.tfrecord.source import KIND, TFRecordSource
from allstep.errors import DataError
from support.image_folders import encoded
from support.tfrecord_files import write_records
from support.tutorial_records import tutorial_features, write_labels, write_tutorial


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALLSTEP_CACHE", str(tmp_path / "cache"))


def targets(source: Source) -> list[Any]:
    """Of all samples; the reason in place of a bad one."""
    found: list[Any] = []
    for number in range(len(source)):
        try:
            found.append(source.read(number).target)
        except BadSample as error:
            found.append(error.reason)
    return found


def write_tar(path: Path, labels: Sequence[bytes], extension: str = "cls") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for row, label in enumerate(labels):
            for name, content in (
                (f"{row:03}.jpg", encoded(row)),
                (f"{row:03}.{extension}", label),
            ):
                info = tarfile.TarInfo(name)
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    return path


class TestTheRule:
    @pytest.mark.parametrize(
        ("labels", "kind", "expected"),
        [
            ([b"3", b"0", b"12"], INTEGERS, [3, 0, 12]),
            ([b" 3\n", b"+1", b"007"], INTEGERS, [3, 1, 7]),
            ([b"tench", b"eel", b"tench"], NAMES, [1, 0, 1]),
            ([b"tench", b"12", b"eel"], NAMES, [2, 0, 1]),
            ([b"3", b"1.5", b"2"], NAMES, [2, 0, 1]),
            ([b"1_000", b"2"], NAMES, [0, 1]),
            (["٣".encode(), b"2"], NAMES, [1, 0]),
            ([b"9" * 19, b"2"], NAMES, [1, 0]),
            (["Zürich".encode(), "Ärger".encode()], NAMES, [0, 1]),
            ([3, 0, 12], NUMBERS, [3, 0, 12]),
        ],
    )
    def test_what_labels_are(
        self, tmp_path: Path, labels: list[Any], kind: str, expected: list[int]
    ) -> None:
        source = TFRecordSource(write_labels(tmp_path / "x.tfrecord", labels))
        assert source.labeling.kind == kind
        assert targets(source) == source.targets().tolist() == expected
        if kind == NAMES:
            assert len(source.classes) == len(set(labels)) and list(source.classes) == sorted(
                source.classes
            )
        else:
            assert source.classes == ()

    @pytest.mark.parametrize("write", ["tfrecord", "tar"])
    def test_one_damaged_label_among_integers_does_not_number_all_others(
        self, tmp_path: Path, write: str
    ) -> None:
        """Found by an attack: 7 became s in a tar, and 2 became 4 in sorted order."""
        labels = [b"%d" % (row % 12) for row in range(60)]
        labels[7] = b"s"
        path = tmp_path / f"x.{write}"
        source: Source = (
            TarSource(write_tar(path, labels))
            if write == "tar"
            else TFRecordSource(write_labels(path, labels))
        )
        expected = [row % 12 for row in range(60)]
        expected[7] = -1
        assert source.targets().tolist() == expected
        with pytest.raises(BadSample, match="its label is 's', expected an integer"):
            source.read(7)
        # With a list of names, it is one.
        (tmp_path / "classes.txt").write_text("".join(f"{each}\n" for each in [*range(12), "s"]))
        named = TarSource(path) if write == "tar" else TFRecordSource(path)
        assert named.targets()[7] == 12

    def test_the_kind_is_that_of_all_shards(self, tmp_path: Path) -> None:
        write_labels(tmp_path / "a.tfrecord", [b"1", b"2"])
        write_labels(tmp_path / "b.tfrecord", [b"10", b"x"])
        assert targets(TFRecordSource(tmp_path / "a.tfrecord")) == [1, 2]
        source = TFRecordSource(tmp_path)
        assert source.classes == ("1", "10", "2", "x") and targets(source) == [0, 2, 1, 3]

    def test_labels_from_and_the_number_of_classes_hold_for_integers_as_text(
        self, tmp_path: Path
    ) -> None:
        path = write_labels(tmp_path / "x.tfrecord", [b"1", b"2", b"4", b"0"])
        source = TFRecordSource(path, labels_from=1, num_classes=3)
        assert targets(source) == [0, 1, "its label is 4, expected 1 to 3", source_reason(0, 1)]
        assert source.targets().tolist() == [0, 1, -1, -1]

    def test_names_are_not_shifted(self, tmp_path: Path) -> None:
        rows = [{"image/encoded": b"j", "image/class/label": name} for name in (b"b", b"a")]
        assert targets(
            TFRecordSource(write_records(tmp_path / "x.tfrecord", map(encode, rows)))
        ) == [1, 0]

    def test_classes_txt_numbers_names_and_a_name_it_lacks_is_bad(self, tmp_path: Path) -> None:
        (tmp_path / "classes.txt").write_text("tench\r\ncrane \neel\ncrane\n")
        source = TFRecordSource(
            write_labels(tmp_path / "x.tfrecord", [b"eel", b"tench", b"cat", b"crane"])
        )
        assert targets(source) == [
            2,
            0,
            "its label 'cat' is not one of the 4 names in classes.txt",
            "its label 'crane' is the name of 2 classes: lines 2 and 4 of classes.txt",
        ]
        assert source.targets().tolist() == [2, 0, -1, -1] and len(source.classes) == 4

    def test_classes_txt_does_not_make_names_of_integers(self, tmp_path: Path) -> None:
        (tmp_path / "classes.txt").write_text("tench\neel\n")
        source = TFRecordSource(write_labels(tmp_path / "x.tfrecord", [b"1", b"0", b"2"]))
        assert targets(source) == [1, 0, "its label is 2, expected 0 to 1"] and source.classes == (
            "tench",
            "eel",
        )

    def test_the_classes_of_another_dataset_number_names(self, tmp_path: Path) -> None:
        path = write_labels(tmp_path / "x.tfrecord", [b"b", b"a", b"z"])
        source = TFRecordSource(path, classes=("a", "aa", "b"))
        assert source.classes == ("a", "aa", "b")
        assert targets(source) == [
            2,
            0,
            "its label 'z' is not one of the 3 names in the given classes",
        ]
        # Names of the other dataset are names here, although here all of them are integers.
        path = write_labels(tmp_path / "y.tfrecord", [b"1", b"7"])
        assert targets(TFRecordSource(path, classes=("1", "x")))[0] == 0
        assert targets(TFRecordSource(path, classes=("cat", "dog"))) == [1, 7]

    def test_numbers_among_text_and_text_among_numbers_are_bad(self, tmp_path: Path) -> None:
        source = TFRecordSource(write_labels(tmp_path / "a.tfrecord", [b"a", 3, b"b"]))
        assert targets(source) == [
            0,
            "its label is a number (3), expected text as in most samples",
            1,
        ]
        source = TFRecordSource(write_labels(tmp_path / "b.tfrecord", [0, b"a", 1]))
        assert targets(source) == [
            0,
            "its label is text (b'a'), expected a number as in most samples",
            1,
        ]
        assert source.targets().tolist() == [0, -1, 1]
        kinds = {
            tuple(labels): decide("label", [counted(labels)], ()).kind
            for labels in ([1, b"a"], [b"a", 1])
        }
        assert kinds == {(1, b"a"): NUMBERS, (b"a", 1): NAMES}

    def test_labels_that_cannot_be_read_are_bad_and_the_others_are_not(
        self, tmp_path: Path
    ) -> None:
        labels = [b"a", b"", b"  ", b"\xff\xfe", b"\x00\x01", [b"a", b"b"], None, [], b"b"]
        source = TFRecordSource(write_labels(tmp_path / "x.tfrecord", labels))
        found = targets(source)
        assert (found[0], found[-1]) == (0, 1) and source.classes == ("a", "b")
        empty = "its label is empty, expected an integer or the name of a class"
        assert found[1:3] == [empty, empty]
        assert found[3] == "its label is bytes but not text: b'\\xff\\xfe', expected UTF-8"
        assert found[4] == "its label is bytes but not text: b'\\x00\\x01' has control characters"
        assert found[5] == "its label has 2 values, expected one"
        assert "no feature 'label'" in found[6] and "no value" in found[7]
        assert [bad.number for bad in verify(source).bad if "label" in bad.reason] == list(
            range(1, 8)
        )

    def test_where_no_label_is_text_all_samples_are_bad_for_that_reason(
        self, tmp_path: Path
    ) -> None:
        source = TFRecordSource(write_labels(tmp_path / "x.tfrecord", [b"\x03", b"\x07"]))
        assert all("bytes but not text" in reason for reason in targets(source))
        assert source.describe_labels().startswith(
            "label: none can be read; the first: its label is bytes but not text"
        )
        # Without a transform nothing is decoded.
        with pytest.raises(
            DataError, match=r"none of the 2 samples of an epoch was good.*bytes but not text"
        ):
            list(Loader(source, batch=2, workers=0))

    @given(st.text(st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp"]), min_size=1))
    def test_any_line_of_text_is_a_label_and_a_line_of_classes_txt(self, text: str) -> None:
        if text.strip(" \t\r\n"):
            name = text_of(text.encode())
            assert name.splitlines() == [name] and text_of(f" {text}\n".encode()) == name


def source_reason(label: int, first: int) -> str:
    return (
        f"its label is {label}, expected labels from {first} on; labels_from=0 if they begin with 0"
    )


def counted(labels: Sequence[Any]) -> StoredLabels:
    tally = Tally()
    for label in labels:
        tally.add(label)
    return tally.stored()


class TestDescribed:
    @pytest.mark.parametrize(
        ("labels", "line"),
        [
            ([1, 2], "label: numbers"),
            ([b"1", b"2"], "label: text, integers"),
            ([b"b", b"a"], "label: text, class names, numbered by sorted order (2 classes)"),
            (
                [b"b", b"2"],
                (
                    "label: text, class names, numbered by sorted order (2 classes, of which 1 are"
                    " integers)"
                ),
            ),
        ],
    )
    def test_in_one_line(self, tmp_path: Path, labels: list[Any], line: str) -> None:
        assert (
            TFRecordSource(write_labels(tmp_path / "x.tfrecord", labels)).describe_labels() == line
        )


class TestDamage:
    def test_a_flipped_bit_makes_no_names_of_integers(self, tmp_path: Path) -> None:
        """Labels are read without their checksums; a text that is new is checked."""
        path = write_labels(tmp_path / "x.tfrecord", [b"11", b"12", b"13"])
        content = bytearray(path.read_bytes())
        content[content.index(b"12")] ^= 0x40
        path.write_bytes(content)
        source = TFRecordSource(path)
        assert source.labeling.kind == INTEGERS
        first, second, third = targets(source)
        assert (first, third) == (11, 13) and "CRC32C" in second

    def test_a_flipped_bit_makes_no_new_class(self, tmp_path: Path) -> None:
        path = write_labels(tmp_path / "x.tfrecord", [b"cat", b"cot", b"cat"])
        content = bytearray(path.read_bytes())
        content[content.index(b"cot") + 1] ^= 1
        path.write_bytes(content)
        assert TFRecordSource(path).classes == ("cat",)
        # Without checks the record can be read, and its label is not a class.
        assert "is not one of the 1 names" in targets(TFRecordSource(path, check=False))[1]

    def test_a_cut_shard(self, tmp_path: Path) -> None:
        path = write_labels(tmp_path / "x.tfrecord", [b"cat", b"dog", b"eel"])
        path.write_bytes(path.read_bytes()[:-9])
        source = TFRecordSource(path)
        assert source.classes == ("cat", "dog") and targets(source)[:2] == [0, 1]


class TestIndex:
    def count_reads(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        read, seen = record_labels.label_in, list[int]()
        monkeypatch.setattr(
            record_labels, "label_in", lambda *given: (seen.append(1), read(*given))[1]
        )
        return seen

    def test_labels_are_read_once_and_kept(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = write_labels(tmp_path / "x.tfrecord", [b"%d" % row for row in range(1000)])
        seen = self.count_reads(monkeypatch)
        first = TFRecordSource(path)
        assert 1000 <= len(seen) <= 1100 and first.labeling.kind == INTEGERS
        seen.clear()
        assert TFRecordSource(path).labeling == first.labeling and not seen

    def test_of_numbers_a_few_are_looked_at(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen = self.count_reads(monkeypatch)
        source = TFRecordSource(write_labels(tmp_path / "x.tfrecord", range(5000)))
        assert source.labeling.kind == NUMBERS and len(seen) < 40

    def test_a_shard_of_numbers_among_shards_of_text_is_read_whole(self, tmp_path: Path) -> None:
        """A few records of the second shard show numbers only; its one name must be numbered all
        the same."""
        write_labels(tmp_path / "a.tfrecord", [b"x"] * 300)
        write_labels(tmp_path / "b.tfrecord", [7, b"a", *[7] * 198])
        source = TFRecordSource(tmp_path)
        assert source.classes == ("a", "x") and source.read(301).target == 0

    def test_an_index_of_the_format_before_is_completed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from allstep.data.sources.tfrecord import source as tfrecord

        path = write_labels(tmp_path / "x.tfrecord", [b"b", b"a"])
        monkeypatch.setattr(index_module, "FORMAT", 1)
        monkeypatch.setattr(tfrecord, "_look_at_labels", lambda *_: {})
        TFRecordSource(path, features={})
        old = read_index(index_places(path)[0], KIND)
        assert old is not None and "labels" not in old.extra
        monkeypatch.undo()
        monkeypatch.setenv("ALLSTEP_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(tfrecord, "walk", lambda *_: pytest.fail("walked again"))
        assert TFRecordSource(path).classes == ("a", "b")
        new = read_index(index_places(path)[0], KIND)
        assert new is not None and new.extra["labels"]["stored"]["names"] == ["a", "b"]

    def test_where_the_old_index_cannot_be_replaced_the_new_one_is_in_the_cache(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = write_labels(tmp_path / "x.tfrecord", [b"b", b"a"])
        TFRecordSource(path, features={})
        next_to_shard, cached = index_places(path)
        write = index_module.write_index
        monkeypatch.setattr(
            "allstep.data.sources.label_index.write_index",
            lambda place, *rest: place != next_to_shard and write(place, *rest),
        )
        assert TFRecordSource(path).classes == ("a", "b") and cached.exists()
        seen = self.count_reads(monkeypatch)
        assert TFRecordSource(path).classes == ("a", "b") and not seen

    def test_other_features_have_labels_of_their_own(self, tmp_path: Path) -> None:
        rows = [
            {"image": b"x", "label": 1, "who": b"me"},
            {"image": b"x", "label": 0, "who": b"you"},
        ]
        path = write_records(tmp_path / "x.tfrecord", map(encode, rows))
        for _ in range(2):
            assert TFRecordSource(path).classes == ()
            assert TFRecordSource(path, features={"image": "data", "who": "target"}).classes == (
                "me",
                "you",
            )

    def test_a_remote_shard_is_copied_once(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fsspec = pytest.importorskip("fsspec")
        path = write_labels(
            tmp_path / "x.tfrecord", [b"c%d" % (row % 7) for row in range(200)] + [b"x"]
        )
        tar = write_tar(tmp_path / "x.tar", [b"b", b"a"])
        copy, copies = unpack._copy, list[str]()
        monkeypatch.setattr(unpack, "_copy", lambda file: (copies.append(file.name), copy(file))[1])
        memory = fsspec.filesystem("memory")
        memory.pipe("/labels/x.tfrecord", path.read_bytes())
        memory.pipe("/labels/x.tar", tar.read_bytes())
        try:
            records, tars = (
                TFRecordSource("memory://labels/x.tfrecord"),
                TarSource("memory://labels/x.tar"),
            )
            assert len(records.classes) == 8 and tars.classes == ("a", "b") and len(copies) == 2
        finally:
            memory.rm("/labels", recursive=True)

    def test_another_process_numbers_alike(self, tmp_path: Path) -> None:
        """Also where `classes.txt` is changed meanwhile."""
        path = write_labels(tmp_path / "x.tfrecord", [b"b", b"a"])
        tar = write_tar(tmp_path / "y.tar", [b"b", b"a"])
        for source in (TFRecordSource(path), TarSource(tar)):
            pickled = pickle.dumps(source)
            (tmp_path / "classes.txt").write_text("b\na\n")
            again = pickle.loads(pickled)
            assert targets(again) == targets(source) == [
                1,
                0,
            ] and again.classes == source.classes == ("a", "b")
            (tmp_path / "classes.txt").unlink()

    def test_another_classes_txt_counts_again(self, tmp_path: Path) -> None:
        path = write_labels(tmp_path / "x.tfrecord", [b"b", b"a", b"c"])
        assert TFRecordSource(path).targets().tolist() == [1, 0, 2]
        for names, expected in (("c\nb\na\n", [1, 2, 0]), ("b\na\n", [0, 1, -1])):
            (tmp_path / "classes.txt").write_text(names)
            assert TFRecordSource(path).targets().tolist() == expected


class TestTar:
    @pytest.mark.parametrize(
        ("labels", "extension", "expected"),
        [
            ([b"3\n", b"12"], "cls", [3, 12]),
            ([b"tench\n", b"eel"], "cls", [1, 0]),
            ([b"tench", b"12"], "cls", [1, 0]),
            ([b"3", b" 4"], "txt", [3, 4]),
            ([b'{"label": 3}', b'{"class": 4}'], "json", [3, 4]),
            ([b'{"label": "3"}', b'{"label": "4"}'], "json", [3, 4]),
            ([b'{"label": "tench"}', b'{"label": "eel"}'], "json", [1, 0]),
            ([b'"tench"', b'"eel"'], "json", [1, 0]),
        ],
    )
    def test_the_same_rule(
        self, tmp_path: Path, labels: list[bytes], extension: str, expected: list[int]
    ) -> None:
        path = write_tar(tmp_path / "x.tar", labels, extension)
        for source in (TarSource(path), pickle.loads(pickle.dumps(TarSource(path)))):
            assert targets(source) == source.targets().tolist() == expected

    def test_a_caption_is_no_label_and_a_name_in_classes_txt_is(self, tmp_path: Path) -> None:
        path = write_tar(tmp_path / "x.tar", [b"a tench", b"an eel"], "txt")
        with pytest.raises(
            DataError, match=r"no label .*in txt one that classes.txt lists.* target=\"\.\.\.\""
        ):
            TarSource(path)
        assert targets(TarSource(path, target="txt")) == [0, 1]
        (tmp_path / "classes.txt").write_text("an eel\na tench\n")
        assert targets(TarSource(path)) == [1, 0]

    def test_bad_labels(self, tmp_path: Path) -> None:
        (tmp_path / "classes.txt").write_text("eel\ntench\n")
        source = TarSource(write_tar(tmp_path / "x.tar", [b"eel", b"", b"\xff", b"cat", b"tench"]))
        found = targets(source)
        assert (
            (found[0], found[4]) == (0, 1)
            and "empty" in found[1]
            and "bytes but not text" in found[2]
        )
        assert found[3] == "its label 'cat' is not one of the 2 names in classes.txt"
        assert [bad.number for bad in verify(source).bad] == [1, 2, 3]
        mixed = TarSource(
            write_tar(tmp_path / "y.tar", [b'{"label": 1}', b'{"label": "eel"}', b"2"], "json")
        )
        text = "its label is text ('eel'), expected a number as in most samples"
        assert targets(mixed) == [1, text, "its label is 2, expected 0 to 1"]

    def test_a_changed_label_makes_no_names_where_checksums_are_stored(
        self, tmp_path: Path
    ) -> None:
        path = write_tar(tmp_path / "x.tar", [b"1", b"2", b"3"])
        TarSource(path, checksum=True)
        content = bytearray(path.read_bytes())
        content[content.index(b"2" + bytes(511))] = ord("x")
        path.write_bytes(content)
        source = TarSource(path)
        assert source.labeling.kind == INTEGERS and targets(source)[::2] == [1, 3]

    def test_checksums_of_an_index_of_the_format_before_are_kept(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = write_tar(tmp_path / "x.tar", [b"1", b"2"])
        with monkeypatch.context() as old:
            old.setattr(index_module, "FORMAT", 1)
            TarSource(path, checksum=True)
        content = bytearray(path.read_bytes())
        content[700] ^= 1
        path.write_bytes(content)
        assert "changed since checksums were stored" in targets(TarSource(path))[0]


class TestRaw:
    def rows(self, labels: Sequence[Any]) -> list[dict[str, Any]]:
        return [
            {"image/raw": bytes([row] * 12), "image/shape": [2, 2, 3], "label": one}
            for row, one in enumerate(labels)
        ]

    @pytest.mark.parametrize(
        ("labels", "expected"), [([b"b", b"a", b"b"], [1, 0, 1]), ([b"3", b"1", b"2"], [3, 1, 2])]
    )
    def test_the_same_rule(self, tmp_path: Path, labels: list[bytes], expected: list[int]) -> None:
        source = open_source(write_records(tmp_path / "x.tfrecord", map(encode, self.rows(labels))))
        assert targets(source) == source.targets().tolist() == expected
        assert [source.read(row).data.max() for row in range(3)] == [0, 1, 2]
        (batch,) = Loader(source, batch=3, workers=0, seed=None)
        assert batch.target.tolist() == expected and batch.data.shape == (3, 2, 2, 3)

    def test_a_number_among_text_is_bad_in_a_block_too(self, tmp_path: Path) -> None:
        source = open_source(
            write_records(tmp_path / "x.tfrecord", map(encode, self.rows([b"b", 1, b"a"])))
        )
        assert source.block(np.array([1])) is None and "expected text" in targets(source)[1]


class TestTutorialLayout:
    def test_the_image_is_found_as_image_raw(self, tmp_path: Path) -> None:
        source = TFRecordSource(write_tutorial(tmp_path / "x.tfrecord", [b"tench", b"eel"]))
        assert bytes(source.read(0).data) == tutorial_features(0, b"")["image_raw"] and targets(
            source
        ) == [1, 0]
        assert not verify(source).bad

    def test_image_raw_may_be_pixels(self, tmp_path: Path) -> None:
        """TensorFlow's MNIST example stored them so, with height, width and depth."""
        pixels = np.arange(28 * 28, dtype=np.uint8).reshape(28, 28, 1)
        row = {"image_raw": pixels.tobytes(), "height": 28, "width": 28, "depth": 1, "label": 7}
        source = TFRecordSource(write_records(tmp_path / "x.tfrecord", [encode(row)]))
        assert np.array_equal(source.read(0).data, pixels) and source.read(0).target == 7

    @pytest.mark.parametrize(
        "sides", [{}, {"height": 0, "width": -4, "depth": 1}, {"height": [2, 2]}, {"height": b"2"}]
    )
    def test_sizes_that_do_not_match(self, tmp_path: Path, sides: dict[str, Any]) -> None:
        row = {"image_raw": b"file", "width": 2, "depth": 1, "label": 7, **sides}
        source = TFRecordSource(write_records(tmp_path / "x.tfrecord", [encode(row)]))
        assert bytes(source.read(0).data) == b"file"
        row = {"image_raw": [1, 2], "label": 7}
        source = TFRecordSource(write_records(tmp_path / "y.tfrecord", [encode(row)]))
        assert targets(source) == ["expected bytes in 'image_raw', found numbers"]


def test_a_labeling_without_text_changes_nothing() -> None:
    same = Labeling()
    for label in (3, 2.5, None, np.array([1, 2])):
        assert same.value(label) is label
    assert same.key() == [] and json.loads(json.dumps(counted([b"a"]).to_json()))["names"] == ["a"]
    assert StoredLabels.from_json(counted([b"a"]).to_json()) == counted([b"a"])
