"""TFRecord shards as a source. The reference is what was written, by `frame`."""

import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from allstep.data import Transform
from allstep.data.augment import Resize
from allstep.data.loading.loader import Loader
from allstep.data.packing.source import with_all_features
from allstep.data.sources import unpack
from allstep.data.sources.open_file import RemoteFile
from allstep.data.sources.source import BadSample
from allstep.data.sources.tfrecord.example import encode
from allstep.data.sources.tfrecord.framing import frame
from allstep.data.sources.tfrecord.source import TFRecordSource, is_tfrecord
from allstep.errors import DataError
from support.synthetic_photos import encoded, scene
from support.tfrecord_files import read_records, write_records

Write = Callable[..., Path]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALLSTEP_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(records: list[Any], name: str = "x.tfrecord") -> Path:
        path = tmp_path / "set" / name
        path.parent.mkdir(exist_ok=True)
        return write_records(
            path, (encode(record) if isinstance(record, dict) else record for record in records)
        )

    return write


def raw_records(pixels: Any, labels: Any) -> list[dict[str, Any]]:
    return [
        {"image/raw": one.tobytes(), "image/shape": list(one.shape), "label": int(label)}
        for one, label in zip(pixels, labels, strict=True)
    ]


def random_images(n: int, *shape: int) -> tuple[Any, Any]:
    random = np.random.default_rng(0)
    return random.integers(0, 256, (n, *shape), np.uint8), random.integers(0, 300, n)


def test_records_are_read_back(tmp_path: Path, write: Write) -> None:
    records = [b"", b"a", bytes(1000), bytes(1000), bytes(1000)]
    path = write(records)
    assert path.read_bytes() == b"".join(map(frame, records))
    assert [bytes(data) for data in read_records(path.read_bytes())] == records
    source = TFRecordSource(path, features={})
    assert [bytes(source.read(number).data) for number in range(len(source))] == records
    assert source.place(2).offset == len(frame(b"") + frame(b"a"))


def test_numbers_go_through_all_shards_in_order(write: Write) -> None:
    for shard in (2, 0, 1):
        write(
            [{"image": b"%d-%d" % (shard, row), "label": row} for row in range(shard * 2)],
            f"x-{shard}.tfrecord",
        )
    folder = write([], "x-3.tfrecord").parent
    source = TFRecordSource(folder)
    names = [bytes(source.read(number).data) for number in range(len(source))]
    assert names == [b"1-0", b"1-1", b"2-0", b"2-1", b"2-2", b"2-3"]
    assert source.targets().tolist() == [0, 1, 0, 1, 2, 3]
    with pytest.raises(IndexError, match="6 of 6"):
        source.read(6)
    with pytest.raises(IndexError):
        source.read(-1)


def test_equal_records_are_found_as_well_as_different_ones(write: Write) -> None:
    lengths = [10] * 3000 + [11] * 9 + [12] + [10] * 5000 + [0] * 20
    source = TFRecordSource(write([bytes(length) for length in lengths]), features={})
    assert [len(source.read(number).data) for number in range(len(source))] == lengths


def test_tensorflow_names_count_labels_from_one(write: Write) -> None:
    path = write(
        [
            {"image/encoded": b"j", "image/class/label": label, "image/class/text": "cat"}
            for label in (1, 1000, 0)
        ]
    )
    source = TFRecordSource(path)
    assert source.read(0).target == 0 and source.read(1).target == 999
    assert source.read(0).fields == {"text": b"cat"}
    with pytest.raises(BadSample, match="label is 0, expected labels from 1 on; labels_from=0"):
        TFRecordSource(path, labels_from=1).read(2)
    assert TFRecordSource(path, labels_from=0).read(2).target == 0


def test_a_label_of_zero_where_labels_usually_begin_with_one_is_not_guessed(write: Write) -> None:
    """Some converters begin with 0 there: skipping these samples would shift all other labels."""
    image = encoded(scene(8, 8), "PNG")
    path = write(
        [{"image/encoded": image, "image/class/label": label} for label in (1, 2, 0, 2, -1)]
    )
    message = r"its label is 0 in image/class/label.*data.labels_from=0 .*--labels-from 0"
    source = TFRecordSource(path)
    for opened in (source, pickle.loads(pickle.dumps(source))):
        with pytest.raises(DataError, match=message) as caught:
            opened.read(2)
        assert not isinstance(caught.value, BadSample)
        with pytest.raises(DataError, match=message):
            opened.targets()
        with pytest.raises(BadSample, match="label is -1, expected labels from 1 on"):
            opened.read(4)
    with pytest.raises(DataError, match=message):
        list(Loader(source, Transform(Resize(8)), batch=2, workers=0))
    assert TFRecordSource(path, labels_from=0).targets().tolist() == [1, 2, 0, 2, -1]
    assert TFRecordSource(path, labels_from=1).targets().tolist() == [0, 1, -1, 1, -1]


def test_a_map_delivers_any_feature(write: Write) -> None:
    path = write(
        [
            {
                "wave": np.arange(3, dtype=np.float32),
                "age": 2.5,
                "tags": [b"a", b"b"],
                "id": 7,
                "pair": [1, 2],
            }
        ]
    )
    fields = {"wave": "data", "age": "target", "tags": "tags", "id": "number", "pair": "pair"}
    sample = TFRecordSource(path, features=fields).read(0)
    assert sample.data.tolist() == [0, 1, 2] and sample.target == 2.5
    assert sample.fields["tags"] == [b"a", b"b"] and sample.fields["number"] == 7
    assert sample.fields["pair"].tolist() == [1, 2]


def test_without_a_known_feature_the_error_names_what_is_there(write: Write) -> None:
    with pytest.raises(DataError, match="known as the image; features: age, wave"):
        TFRecordSource(write([{"wave": 1.0, "age": 1}]))
    with pytest.raises(DataError, match="known as the label; features: image;"):
        TFRecordSource(write([{"image": b"x"}], "y.tfrecord"))
    with pytest.raises(DataError, match="has no record"):
        TFRecordSource(write([], "z.tfrecord"))


def test_an_error_in_one_sample_names_that_sample(write: Write) -> None:
    path = write(
        [
            {"image": b"x", "label": 1},
            {"image": b"x"},
            {"image": b"x", "label": []},
            {"image": b"x", "label": 3},
            b"\xff",
        ]
    )
    path.with_name("classes.txt").write_text("cat\ndog\nfrog\n")
    source = TFRecordSource(path)
    assert source.classes == ("cat", "dog", "frog") and source.read(0).target == 1
    for number, reason in (
        (1, "no feature 'label'"),
        (2, "no value"),
        (3, "label is 3, expected 0 to 2"),
        (4, "Example"),
    ):
        with pytest.raises(BadSample, match=reason) as caught:
            source.read(number)
        assert caught.value.number == number and caught.value.place == source.place(number)
    assert source.targets().tolist() == [1, -1, -1, -1, -1]


def test_raw_images_are_views_and_blocks_are_what_read_gives(write: Write) -> None:
    pixels, labels = random_images(100, 8, 6, 3)
    source = TFRecordSource(write(raw_records(pixels, labels)))
    one = source.read(3)
    assert (
        not one.data.flags.owndata
        and np.array_equal(one.data, pixels[3])
        and one.target == labels[3]
    )
    numbers = np.random.default_rng(1).permutation(100)
    block = source.block(numbers)
    assert block is not None
    assert np.array_equal(block.data, pixels[numbers]) and np.array_equal(
        block.target, labels[numbers]
    )


def test_a_block_also_fits_records_with_the_label_first(write: Write) -> None:
    pixels, labels = random_images(20, 4, 4)
    records = [
        {"a": label, **record}
        for label, record in zip(labels, raw_records(pixels, labels), strict=True)
    ]
    path = write(
        [{key: value for key, value in record.items() if key != "label"} for record in records]
    )
    block = TFRecordSource(path, features={"a": "target", "image/raw": "data"}).block(np.arange(20))
    assert (
        block is not None
        and np.array_equal(block.data, pixels)
        and np.array_equal(block.target, labels)
    )


@pytest.mark.parametrize("label", [b"\x05", [1, 2], [], 1.5, 2**40])
def test_there_is_no_block_of_labels_that_are_no_small_number(write: Write, label: Any) -> None:
    path = write([{"image/raw": bytes(12), "image/shape": [2, 2, 3], "label": label}])
    source = TFRecordSource(path, features={"image/raw": "data", "label": "target"})
    assert source.block(np.array([0])) is None


def test_there_is_no_block_of_what_cannot_be_stacked(write: Write) -> None:
    small, labels = random_images(3, 4, 4, 3)
    large, _ = random_images(3, 5, 4, 3)
    source = TFRecordSource(write(raw_records(small, labels) + raw_records(large, labels)))
    assert source.block(np.array([0, 1])) is not None and source.block(np.array([3, 4])) is not None
    assert source.block(np.array([0, 4])) is None
    assert (
        TFRecordSource(write([{"image": b"jpeg", "label": 1}], "y.tfrecord")).block(np.array([0]))
        is None
    )


def test_there_is_no_block_with_a_damaged_record_in_it(write: Write) -> None:
    pixels, labels = random_images(5, 4, 4, 3)
    path = write(raw_records(pixels, labels))
    content = bytearray(path.read_bytes())
    content[TFRecordSource(path).place(2).offset + 40] ^= 1
    path.write_bytes(content)
    source = TFRecordSource(path)
    assert source.block(np.arange(5)) is None and source.block(np.array([0, 1, 3, 4])) is not None
    with pytest.raises(BadSample, match="CRC32C"):
        source.read(2)
    assert TFRecordSource(path, check=False).block(np.arange(5)) is not None


def test_a_block_checks_labels_and_a_wrong_shape(write: Write) -> None:
    pixels, _ = random_images(2, 4, 4, 3)
    source = TFRecordSource(write(raw_records(pixels, [1, 2])), num_classes=2)
    assert source.block(np.array([0])) is not None and source.block(np.array([0, 1])) is None
    wrong = [
        {"image/raw": b"123", "image/shape": [2, 2], "label": 1},
        {"image/raw": 3, "image/shape": [2, 2], "label": 1},
    ]
    source = TFRecordSource(write(wrong, "y.tfrecord"))
    assert source.block(np.array([0])) is None
    with pytest.raises(BadSample, match=r"3 bytes of pixels do not fit its shape \(2, 2\)"):
        source.read(0)
    with pytest.raises(BadSample, match="expected bytes"):
        source.read(1)


def test_a_source_pickles_as_a_description(write: Write) -> None:
    path = write([{"image": b"x" * 100, "label": 1}] * 50)
    source = TFRecordSource(path, num_classes=2)
    source.read(0)
    pickled = pickle.dumps(source)
    again = pickle.loads(pickled)
    assert (
        len(pickled) < 1000
        and len(again) == 50
        and again.read(49).target == 1
        and again.layout == source.layout
    )


def test_a_view_outlives_its_source(write: Write) -> None:
    source = TFRecordSource(write([b"x" * 100_000]), features={})
    data = source.read(0).data
    source.close()
    del source
    assert bytes(data) == b"x" * 100_000


def test_a_file_that_changes_after_it_was_opened_is_refused(write: Write) -> None:
    path = write([b"one", b"two"])
    source = TFRecordSource(path, features={})
    path.write_bytes(frame(b"one"))
    with pytest.raises(DataError, match="was changed after it was opened"):
        source.read(0)


def test_a_shard_that_is_as_plain_as_a_packed_one_looks(write: Write) -> None:
    """Lengths whose first bytes are zlib's."""
    length = 0x0178
    assert unpack.packing(frame(bytes(length))) == "zlib"
    assert len(TFRecordSource(write([bytes(length)] * 2), features={})) == 2


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("a.tfrecord", True),
        ("a.tfrecords.gz", True),
        ("a.tfrecord-00000-of-00010", True),
        ("train-00000-of-01024", True),
        ("a.tfrec", True),
        ("classes.txt", False),
        ("x-00000-of-00002.tar", False),
        ("one-of-two", False),
    ],
)
def test_names_of_shards(name: str, is_one: bool) -> None:
    assert is_tfrecord(name) is is_one


def test_remote_shards_are_read_by_ranges(write: Write) -> None:
    fsspec = pytest.importorskip("fsspec")
    path = write([{"image": b"%d" % row, "label": row} for row in range(10)])
    memory = fsspec.filesystem("memory")
    memory.pipe("/remote/x.tfrecord", path.read_bytes())
    memory.pipe("/remote/classes.txt", b"\n".join(b"%d" % row for row in range(10)))
    try:
        source = TFRecordSource("memory://remote")
        assert [source.read(number).target for number in range(10)] == list(range(10)) and len(
            source.classes
        ) == 10
        assert source.place(0).file == "memory:///remote/x.tfrecord"
        assert isinstance(source.shards[0].file, RemoteFile)
    finally:
        memory.rm("/remote", recursive=True)


def test_many_threads_read_at_once(write: Write) -> None:
    for shard in range(5):
        write(
            [{"image": b"%d-%d" % (shard, row), "label": row} for row in range(40)],
            f"x-{shard}.tfrecord",
        )
    source = TFRecordSource(write([], "y.tfrecord").parent)
    numbers = np.random.default_rng(0).integers(0, 200, 2000).tolist()
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda number: bytes(source.read(number).data), numbers))
    assert found == [b"%d-%d" % divmod(number, 40) for number in numbers]


def test_the_text_of_a_class_may_be_missing(tmp_path: Path) -> None:
    first = {"image/encoded": b"j", "image/class/label": 1, "image/class/text": "cat"}
    records = [first, {"image/encoded": b"j", "image/class/label": 2}]
    (tmp_path / "x.tfrecord").write_bytes(b"".join(frame(encode(record)) for record in records))
    for source in (TFRecordSource(tmp_path), pickle.loads(pickle.dumps(TFRecordSource(tmp_path)))):
        assert [dict(source.read(number).fields) for number in (0, 1)] == [{"text": b"cat"}, {}]
    packed = with_all_features(TFRecordSource(tmp_path))
    assert [dict(packed.read(number).fields) for number in (0, 1)] == [
        {"image/class/text": b"cat"},
        {},
    ]


def test_another_process_does_not_take_another_shard_for_this_one(tmp_path: Path) -> None:
    path = tmp_path / "x.tfrecord"
    path.write_bytes(frame(b"one") + frame(b"two"))
    pickled = pickle.dumps(TFRecordSource(path, {}))
    assert len(pickle.loads(pickled)) == 2
    path.write_bytes(frame(b"zero") + frame(b"one") + frame(b"two"))
    with pytest.raises(DataError, match=r"x.tfrecord: was changed after it was opened"):
        pickle.loads(pickled)
