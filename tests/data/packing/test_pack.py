"""Packing stores each sample of the source once; a kill or an error does not change the bytes."""

import io
import json
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from allstep.data.opening import open_source
from allstep.data.packing.pack import pack
from allstep.data.packing.shard_plan import Options, Origin, Plan, num_shards
from allstep.data.sources.arrays import ArraySource
from allstep.data.sources.tfrecord.example import decode, encode
from allstep.data.sources.tfrecord.framing import frame
from allstep.errors import ConfigError, DataError
from support.image_folders import CLASSES, aged, encoded
from support.packed import NUM, everything, packed, shards
from support.tfrecord_files import read_records


class TestWhatIsInIt:
    @pytest.mark.parametrize("to", ["tfrecord", "tar"])
    def test_the_samples_in_their_order(self, folder: Path, tmp_path: Path, to: str) -> None:
        outcome = packed(folder, tmp_path / "out", to=to, shard_samples=10)
        assert (outcome.num_samples, outcome.num_shards, outcome.bad) == (NUM, 3, ())
        assert list(shards(tmp_path / "out")) == [f"x-0000{i}-of-00003.{to}" for i in range(3)]
        there = open_source(str(tmp_path / "out"))
        assert everything(there) == everything(open_source(str(folder)))
        assert there.classes == CLASSES

    def test_a_shard_has_about_the_requested_size(self, folder: Path, tmp_path: Path) -> None:
        packed(folder, tmp_path / "out", shard_mb=0.005)
        sizes = [len(content) for content in shards(tmp_path / "out").values()]
        assert len(sizes) > 2
        assert all(3000 < size < 8000 for size in sizes)

    def test_every_shard_has_its_index(self, folder: Path, tmp_path: Path) -> None:
        packed(folder, tmp_path / "out", shard_samples=10)
        names = {path.name for path in (tmp_path / "out").iterdir()}
        assert {f".x-0000{i}-of-00003.tfrecord.allstep-index" for i in range(3)} <= names
        assert not [name for name in names if name.endswith(".part")]

    def test_shuffled_every_sample_comes_once(self, folder: Path, tmp_path: Path) -> None:
        packed(folder, tmp_path / "a", shuffle=1, shard_samples=7)
        packed(folder, tmp_path / "b", shuffle=2, shard_samples=7)
        before = everything(open_source(str(folder)))
        one, two = (
            everything(open_source(str(tmp_path / "a"))),
            everything(open_source(str(tmp_path / "b"))),
        )
        assert sorted(one) == sorted(two) == sorted(before)
        assert one != two != before != one

    def test_the_number_of_threads_changes_nothing(self, folder: Path, tmp_path: Path) -> None:
        for jobs in (1, 3):
            packed(
                folder, tmp_path / f"{jobs}", jobs=jobs, max_side=20, shuffle=0, shard_samples=10
            )
        assert shards(tmp_path / "1") == shards(tmp_path / "3")

    # Importing TensorFlow takes 5 s, and longer on a busy machine.
    @pytest.mark.usefixtures("peers")
    @pytest.mark.timeout(300)
    def test_tensorflow_reads_it(self, folder: Path, tmp_path: Path) -> None:
        packed(folder, tmp_path / "out", shard_samples=10)
        tf = pytest.importorskip("tensorflow")
        names = sorted(str(path) for path in (tmp_path / "out").glob("*.tfrecord"))
        found = []
        for record in tf.data.TFRecordDataset(names):
            features = tf.train.Example.FromString(record.numpy()).features.feature
            image = Image.open(io.BytesIO(features["image"].bytes_list.value[0]))
            assert list(features["shape"].int64_list.value) == [image.height, image.width]
            name = features["filename"].bytes_list.value[0].decode()
            found.append(
                (features["image"].bytes_list.value[0], features["label"].int64_list.value[0], name)
            )
        files = [path for name in CLASSES for path in sorted((folder / name).iterdir())]
        assert found == [(p.read_bytes(), CLASSES.index(p.parent.name), p.name) for p in files]

    # webdataset imports torch.
    @pytest.mark.usefixtures("peers")
    @pytest.mark.timeout(300)
    def test_webdataset_reads_it(self, folder: Path, tmp_path: Path) -> None:
        tars = pytest.importorskip("webdataset.tariterators")
        packed(folder, tmp_path / "out", to="tar", shard_samples=24)
        with (tmp_path / "out" / "x-00000-of-00001.tar").open("rb") as file:
            samples = list(
                tars.group_by_keys(tars.tar_file_expander([{"stream": file, "url": "x"}]))
            )
        found = [(sample.get("jpg") or sample["png"], int(sample["cls"])) for sample in samples]
        assert found == everything(open_source(str(folder)))

    def test_a_tar_that_is_packed_again_keeps_other_features(
        self, folder: Path, tmp_path: Path
    ) -> None:
        with tarfile.open(tmp_path / "old.tar", "w") as archive:
            for name, content in (
                ("a.jpg", encoded(1)),
                ("a.cls", b"2"),
                ("a.json", b'{"box": [1, 2]}'),
                ("a.txt", b"text"),
            ):
                info = tarfile.TarInfo(name)
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
        packed(tmp_path / "old.tar", tmp_path / "tar", to="tar")
        sample = open_source(str(tmp_path / "tar")).read(0)
        assert (bytes(sample.data), sample.target) == (encoded(1), 2)
        assert sample.fields["json"] == {"box": [1, 2], "txt": "text"}
        packed(tmp_path / "old.tar", tmp_path / "records")
        (record,) = read_records(shards(tmp_path / "records")["x-00000-of-00001.tfrecord"])
        features = decode(record)
        assert [bytes(features[name][0]) for name in ("json", "txt", "filename")] == [
            b'{"box": [1, 2]}',
            b"text",
            b"a",
        ]

    def test_other_features_of_tfrecords_are_kept(self, folder: Path, tmp_path: Path) -> None:
        box = {
            "image/encoded": encoded(1),
            "image/class/label": 3,
            "box": [0.5, 0.25],
            "image/filename": "a.jpg",
        }
        (tmp_path / "old").mkdir()
        bare = {"image/encoded": encoded(2), "image/class/label": 1}
        (tmp_path / "old" / "a.tfrecord").write_bytes(frame(encode(box)) + frame(encode(bare)))
        packed(tmp_path / "old", tmp_path / "out")
        first, second = map(
            decode, read_records(shards(tmp_path / "out")["x-00000-of-00001.tfrecord"])
        )
        assert np.asarray(first["box"]).tolist() == [0.5, 0.25]
        assert [bytes(first["filename"][0]), int(first["label"][0]), int(second["label"][0])] == [
            b"a.jpg",
            2,
            0,
        ]
        assert set(second) == {"image", "label", "shape", "filename"}


@given(n=st.integers(1, 300), per_shard=st.integers(1, 100), seed=st.none() | st.integers(0, 2**32))
@settings(max_examples=500 if os.environ.get("ALLSTEP_SOAK") else 30)
def test_every_sample_has_one_place(n: int, per_shard: int, seed: int | None) -> None:
    options = Options("x", shard_samples=per_shard, shuffle=seed)
    plan = Plan(options, Origin("x", n, ""), num_shards(options, n, 1.0), 1)
    spans = [plan.span(shard) for shard in range(plan.num_shards)]
    assert [start for start, _ in spans] == [0, *(stop for _, stop in spans[:-1])]
    assert all(1 <= stop - start <= per_shard for start, stop in spans)
    numbers = np.concatenate([plan.numbers(*span) for span in spans])
    np.testing.assert_array_equal(np.sort(numbers), np.arange(n))


class TestImages:
    def test_only_larger_ones_are_made_smaller(self, tmp_path: Path) -> None:
        for name, sides in (("small", (70, 100)), ("large", (360, 640))):
            (tmp_path / "photos" / name).mkdir(parents=True)
            (tmp_path / "photos" / name / "a.jpg").write_bytes(encoded(7, *sides))
        packed(aged(tmp_path / "photos"), tmp_path / "out", max_side=100)
        there = open_source(str(tmp_path / "out"))
        assert bytes(there.read(1).data) == encoded(7, 70, 100)
        smaller = Image.open(io.BytesIO(there.read(0).data))
        assert (smaller.format, smaller.height, smaller.width) == ("JPEG", 56, 100)
        reference = io.BytesIO()
        Image.open(io.BytesIO(encoded(7, 360, 640))).resize((100, 56), Image.Resampling.BOX).save(
            reference, "JPEG", quality=90
        )
        reference = Image.open(reference)
        assert np.abs(np.asarray(smaller, int) - np.asarray(reference, int)).mean() < 2

    def test_pixels_are_those_of_pillow(self, folder: Path, tmp_path: Path) -> None:
        packed(folder, tmp_path / "out", raw=True)
        there, before = open_source(str(tmp_path / "out")), open_source(str(folder))
        for number in range(NUM):
            expected = np.asarray(
                Image.open(io.BytesIO(before.read(number).data)).convert("RGB"), int
            )
            found = there.read(number)
            assert found.data.shape == expected.shape
            # The two JPEG decoders round differently.
            assert np.abs(found.data - expected).max() <= 2
            assert found.target == before.read(number).target

    def test_raw_arrays_come_back_as_they_were(self, tmp_path: Path) -> None:
        data = np.random.default_rng(0).integers(0, 256, (50, 32, 32, 3), np.uint8)
        source = ArraySource(data, np.arange(50) % 10)
        pack(source, "arrays", tmp_path / "out", Options("x", raw=True, shard_samples=20))
        there = open_source(str(tmp_path / "out"))
        block = there.block(np.arange(50)[::-1].copy())
        assert block is not None
        np.testing.assert_array_equal(block.data, data[::-1])
        np.testing.assert_array_equal(block.target, (np.arange(50) % 10)[::-1])

    @pytest.mark.parametrize("shape", [(28, 28), (28, 20, 3)])
    def test_arrays_become_png(self, tmp_path: Path, shape: tuple[int, ...]) -> None:
        data = np.random.default_rng(0).integers(0, 256, (5, *shape), np.uint8)
        pack(ArraySource(data, np.arange(5)), "arrays", tmp_path / "out", Options("x"))
        there = open_source(str(tmp_path / "out"))
        for number in range(5):
            image = Image.open(io.BytesIO(there.read(number).data))
            assert image.format == "PNG"
            np.testing.assert_array_equal(np.asarray(image), data[number])

    @pytest.mark.parametrize("kind", ["jpeg", "png", "webp"])
    def test_all_in_one_format(self, folder: Path, tmp_path: Path, kind: str) -> None:
        packed(folder, tmp_path / "out", format=kind)
        there = open_source(str(tmp_path / "out"))
        formats = {Image.open(io.BytesIO(there.read(number).data)).format for number in range(NUM)}
        assert formats == {kind.upper()}


class TestBadSamples:
    @pytest.fixture
    def spoilt(self, folder: Path) -> Path:
        (folder / "cat" / "003.jpg").write_bytes(b"not an image at all")
        (folder / "dog" / "001.jpg").write_bytes(encoded(5)[:200])
        return folder

    def test_are_left_out_and_listed(self, spoilt: Path, tmp_path: Path) -> None:
        outcome = packed(spoilt, tmp_path / "out", raw=True, shard_samples=10)
        lines = [
            json.loads(line)
            for line in (tmp_path / "out" / "quarantine.jsonl").read_text().splitlines()
        ]
        assert [(line["number"], Path(line["file"]).name) for line in lines] == [
            (3, "003.jpg"),
            (9, "001.jpg"),
        ]
        assert all(line["reason"] for line in lines)
        assert (outcome.num_samples, len(outcome.bad)) == (NUM - 2, 2)
        assert len(open_source(str(tmp_path / "out"))) == NUM - 2
        assert packed(spoilt, tmp_path / "out", raw=True, shard_samples=10).bad == outcome.bad

    def test_too_many(self, spoilt: Path, tmp_path: Path) -> None:
        message = r"2 of 24 samples are bad, more than the 1 allowed; the first: sample 3 .*003.jpg"
        with pytest.raises(DataError, match=message):
            packed(spoilt, tmp_path / "out", raw=True, budget=1)
        with pytest.raises(DataError, match=r"more than the 0 allowed; the first: sample 3"):
            packed(spoilt, tmp_path / "strict", raw=True, strict=True)

    def test_none_is_good(self, tmp_path: Path) -> None:
        (tmp_path / "photos" / "cat").mkdir(parents=True)
        (tmp_path / "photos" / "cat" / "a.jpg").write_bytes(b"no")
        with pytest.raises(DataError, match="none of 1 samples tried can be packed"):
            packed(aged(tmp_path / "photos"), tmp_path / "out")
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"to": "zip"}, "--to zip"),
        ({"to": "tar", "raw": True}, "--raw is for TFRecord shards"),
        ({"shard_samples": 0}, "--shard-samples 0"),
        *(
            ({"shard_mb": size}, f"--shard-mb {size:g}")
            for size in (-1.0, 0.0, float("nan"), float("inf"))
        ),
        ({"max_side": 0}, "--max-side"),
        ({"quality": 101}, "--quality is 1 to 100"),
        ({"format": "jpg"}, "did you mean 'jpeg'"),
        ({"format": "png", "raw": True}, "give one of the two"),
    ],
)
def test_invalid_options(options: dict[str, object], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        Options("x", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("shard_mb", [1e-6, 5e-324])
def test_more_shards_than_there_are_names(shard_mb: float) -> None:
    with pytest.raises(ConfigError, match="shards of that size are needed, more than 99999"):
        num_shards(Options("x", shard_mb=shard_mb), 1_000_000, 1000.0)


def test_tar_is_as_tar_writes_it(folder: Path, tmp_path: Path) -> None:
    packed(folder, tmp_path / "out", to="tar")
    path = tmp_path / "out" / "x-00000-of-00001.tar"
    assert path.stat().st_size % tarfile.RECORDSIZE == 0
    with tarfile.open(path) as archive:
        members = archive.getmembers()
    assert [member.name for member in members[:4]] == [
        "00000000.jpg",
        "00000000.cls",
        "00000001.jpg",
        "00000001.cls",
    ]
    assert {(member.mtime, member.uid, member.mode) for member in members} == {(0, 0, 0o644)}
