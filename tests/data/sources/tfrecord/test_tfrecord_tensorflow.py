"""TFRecords and Examples compared with TensorFlow: it reads what we write, we read what it writes.

The only tests that import it.
"""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from allstep.data.inspect.verify import verify
from allstep.data.sources.tfrecord import example
from allstep.data.sources.tfrecord.source import TFRecordSource
from support.tfrecord_files import write_records
from support.tutorial_records import tutorial_features


@pytest.fixture(scope="module")
def tf(peers: None) -> Any:
    import warnings

    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its own
        return pytest.importorskip("tensorflow")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALLSTEP_CACHE", str(tmp_path / "cache"))


RANDOM = np.random.default_rng(0)
RECORDS = [RANDOM.bytes(int(length)) for length in (0, 1, 8, 300, 300, 300, 70_000)]
FEATURES = {
    "image": RANDOM.bytes(500),
    "label": 7,
    "negative": [-1, -(2**63), 2**63 - 1, 0, 127, 128],
    "many": [int(n) for n in RANDOM.integers(-(2**62), 2**62, 100)],
    "floats": [0.5, -1.25, 3e38],
    "name": "Zürich",
    "names": [b"a", b"", b"c"],
}


def theirs(tf: Any, features: dict[str, Any]) -> Any:
    """TensorFlow's own message."""
    out = {}
    for name, value in features.items():
        values = value if isinstance(value, list) else [value]
        values = [one.encode() if isinstance(one, str) else one for one in values]
        if isinstance(values[0], bytes):
            out[name] = tf.train.Feature(bytes_list=tf.train.BytesList(value=values))
        elif isinstance(values[0], int):
            out[name] = tf.train.Feature(int64_list=tf.train.Int64List(value=values))
        else:
            out[name] = tf.train.Feature(float_list=tf.train.FloatList(value=values))
    return tf.train.Example(features=tf.train.Features(feature=out))


def write_theirs(tf: Any, path: Path, records: list[bytes], compression: str = "") -> None:
    with tf.io.TFRecordWriter(
        str(path), tf.io.TFRecordOptions(compression_type=compression)
    ) as writer:
        for record in records:
            writer.write(record)


def test_the_framing_is_equal_byte_for_byte_and_read_by_both(tf: Any, tmp_path: Path) -> None:
    ours, reference = tmp_path / "ours.tfrecord", tmp_path / "theirs.tfrecord"
    write_theirs(tf, reference, RECORDS)
    write_records(ours, RECORDS)
    assert ours.read_bytes() == reference.read_bytes()
    assert list(tf.data.TFRecordDataset(str(ours)).as_numpy_iterator()) == RECORDS
    source = TFRecordSource(reference, features={})
    assert [bytes(source.read(number).data) for number in range(len(source))] == RECORDS


@pytest.mark.parametrize("compression", ["GZIP", "ZLIB"])
def test_compressed_files_of_tensorflow_are_read(
    tf: Any, tmp_path: Path, compression: str, capfd: Any
) -> None:
    path = tmp_path / f"x.tfrecord.{compression}"
    write_theirs(tf, path, RECORDS * 20, compression)
    source = TFRecordSource(path, features={})
    assert [bytes(source.read(number).data) for number in range(len(source))] == RECORDS * 20
    assert "is compressed; unpacking it once" in capfd.readouterr().err
    assert len(TFRecordSource(path, features={})) == len(source)
    assert not capfd.readouterr().err
    path.write_bytes(path.read_bytes()[:-5000])
    cut = TFRecordSource(path, features={})
    assert len(cut) <= len(source) and set(cut.shards[0].lost) == {len(cut) - 1}
    assert [bytes(cut.read(number).data) for number in range(len(cut) - 1)] == (RECORDS * 20)[
        : len(cut) - 1
    ]


def test_examples_are_equal_in_value_both_ways(tf: Any) -> None:
    parsed = tf.train.Example.FromString(example.encode(FEATURES))
    assert parsed == theirs(tf, FEATURES)
    ours = example.decode(theirs(tf, FEATURES).SerializeToString())
    assert {name: list(values) for name, values in ours.items()} == {
        name: list(values) for name, values in example.decode(example.encode(FEATURES)).items()
    }
    assert (
        ours["negative"].tolist() == FEATURES["negative"]
        and ours["many"].tolist() == FEATURES["many"]
    )


def test_random_changes_are_read_alike_or_refused_by_us(tf: Any) -> None:
    """Whatever TensorFlow reads of a damaged Example, we read alike or call malformed; we never
    read something else."""
    content = example.encode({"a": [1, 2, 300], "b": b"xyz", "c": [0.5, 1.5]})
    random = np.random.default_rng(1)
    compared = 0
    for _ in range(300):
        damaged = bytearray(content)
        damaged[random.integers(len(content))] ^= 1 << int(random.integers(8))
        try:
            ours = example.decode(bytes(damaged))
            reference = tf.train.Example.FromString(bytes(damaged)).features.feature
        except Exception:  # either calls it malformed
            continue
        compared += 1
        # TensorFlow omits an entry that contains an unknown field.
        for name in reference:
            values = ours[name]
            kind = reference[name].WhichOneof("kind")
            expected = list(getattr(reference[name], kind).value) if kind else []
            assert np.array_equal(
                np.array(list(values)), np.array(expected), equal_nan=kind == "float_list"
            )
    assert compared > 50


def test_tensorflow_parses_records_of_decoded_images(tf: Any, tmp_path: Path) -> None:
    pixels = RANDOM.integers(0, 256, (4, 5, 6, 3), np.uint8)
    path = tmp_path / "x.tfrecord"
    records = [
        theirs(
            tf, {"image/raw": one.tobytes(), "image/shape": [5, 6, 3], "label": row}
        ).SerializeToString()
        for row, one in enumerate(pixels)
    ]
    write_theirs(tf, path, records)
    block = TFRecordSource(path).block(np.arange(4))
    assert (
        block is not None
        and np.array_equal(block.data, pixels)
        and block.target.tolist() == [0, 1, 2, 3]
    )


@pytest.mark.parametrize(
    ("labels", "expected", "classes"),
    [
        ([b"3", b"0", b"3"], [3, 0, 3], ()),
        ([b"tench", b"hen", b"tench"], [1, 0, 1], ("hen", "tench")),
        ([3, 0, 3], [3, 0, 3], ()),
    ],
)
def test_the_record_layout_of_the_tutorials(
    tf: Any, tmp_path: Path, labels: list[Any], expected: list[int], classes: tuple[str, ...]
) -> None:
    """Written by TensorFlow and by us: the same samples, and TensorFlow reads ours."""
    rows = [tutorial_features(row, label) for row, label in enumerate(labels)]
    write_theirs(
        tf, tmp_path / "theirs.tfrecord", [theirs(tf, row).SerializeToString() for row in rows]
    )
    write_records(tmp_path / "ours.tfrecord", map(example.encode, rows))
    for name in ("theirs", "ours"):
        source = TFRecordSource(tmp_path / f"{name}.tfrecord")
        assert (
            [source.read(number).target for number in range(3)]
            == source.targets().tolist()
            == expected
        )
        assert [bytes(source.read(number).data) for number in range(3)] == [
            row["image_raw"] for row in rows
        ]
        assert source.classes == classes and not verify(source).bad
    for record, row in zip(
        tf.data.TFRecordDataset(str(tmp_path / "ours.tfrecord")), rows, strict=True
    ):
        assert tf.train.Example.FromString(record.numpy()) == theirs(tf, row)
