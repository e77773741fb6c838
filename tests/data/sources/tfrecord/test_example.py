"""tf.train.Example without protobuf.

The reference is what was put in; TensorFlow's own is in test_tfrecord_tensorflow.py.
"""

import os
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allstep.data.sources.tfrecord.example import decode, encode, varint

OFTEN = settings() if os.environ.get("ALLSTEP_SOAK") else settings(max_examples=50)
NAMES = st.text(max_size=12)
INTS = st.integers(-(2**63), 2**63 - 1)
FLOATS = st.floats(width=32, allow_nan=False)
VALUES = st.one_of(
    st.lists(st.binary(max_size=40)), st.lists(INTS, max_size=60), st.lists(FLOATS, max_size=20)
)


@OFTEN
@given(st.dictionaries(NAMES, VALUES, max_size=6))
def test_what_is_encoded_is_decoded(features: dict[str, list[Any]]) -> None:
    decoded = decode(encode(features))
    assert {name: list(values) for name, values in decoded.items()} == features


@OFTEN
@given(st.dictionaries(NAMES, VALUES, max_size=6), st.randoms())
def test_equal_features_are_equal_bytes(features: dict[str, list[Any]], random: Any) -> None:
    names = list(features)
    random.shuffle(names)
    assert encode({name: features[name] for name in names}) == encode(features)


@OFTEN
@given(st.binary(max_size=200))
def test_any_bytes_are_an_example_or_a_value_error(content: bytes) -> None:
    try:
        decode(content)
    except ValueError:
        pass


@OFTEN
@given(st.dictionaries(NAMES, VALUES, min_size=1, max_size=4), st.data())
def test_damaged_examples_are_an_example_or_a_value_error(
    features: dict[str, list[Any]], data: st.DataObject
) -> None:
    content = bytearray(encode(features))
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] ^= 1 << data.draw(st.integers(0, 7))
    try:
        decode(memoryview(content)[: data.draw(st.integers(0, len(content)))])
    except ValueError:
        pass


def test_plain_python_and_numpy_values_have_their_kind() -> None:
    values = {
        "bytes": b"\x00\xff",
        "text": "Zürich",
        "int": -1,
        "numpy int": np.int32(7),
        "bool": True,
        "float": 0.5,
        "mixed": [1, 2.5],
        "ints": np.arange(6, dtype=np.uint8).reshape(2, 3),
        "floats": np.array([1.5, 2.5], np.float64),
        "too large": 1e300,
        "nothing": [],
    }
    found = decode(encode(values))
    assert found["bytes"] == [b"\x00\xff"] and found["text"] == ["Zürich".encode()]
    assert [found[name].tolist() for name in ("int", "numpy int", "bool")] == [[-1], [7], [1]]
    assert found["float"].dtype == np.float32 and found["mixed"].tolist() == [1.0, 2.5]
    assert found["ints"].tolist() == [0, 1, 2, 3, 4, 5] and found["ints"].dtype == np.int64
    assert (
        found["floats"].tolist() == [1.5, 2.5]
        and found["too large"].tolist() == [np.inf]
        and len(found["nothing"]) == 0
    )


@pytest.mark.parametrize(
    ("value", "message"),
    [(2**63, "64 bits"), ([b"a", 1], "bytes, int"), ({}, "dict"), (None, "NoneType")],
)
def test_what_no_feature_can_hold_is_refused(value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        encode({"x": value})


def test_only_wanted_features_are_decoded() -> None:
    record = encode({"a": 1, "b": b"x", "c": 2.0})
    assert set(decode(record, ("a", "zz"))) == {"a"}


def test_bytes_of_a_view_are_views() -> None:
    record = encode({"a": b"12345"})
    (value,) = decode(memoryview(record))["a"]
    assert isinstance(value, memoryview) and value.obj is record


def field(number: int, content: bytes, wire: int = 2) -> bytes:
    return varint(number << 3 | wire) + (varint(len(content)) if wire == 2 else b"") + content


def example(name: bytes, feature: bytes) -> bytes:
    return field(1, field(1, field(1, name) + field(2, feature)))


def test_numbers_one_by_one_are_read() -> None:
    ints = b"".join(field(1, varint(number % 2**64), 0) for number in (5, -3, 2**40))
    floats = b"".join(field(1, np.float32(number).tobytes(), 5) for number in (0.5, -2.0))
    assert decode(example(b"i", field(3, ints)))["i"].tolist() == [5, -3, 2**40]
    assert decode(example(b"f", field(2, floats)))["f"].tolist() == [0.5, -2.0]


def test_unknown_fields_of_every_type_are_skipped() -> None:
    group = (
        field(9, b"", 3)
        + field(1, b"in it")
        + field(8, b"", 3)
        + field(8, b"", 4)
        + field(9, b"", 4)
    )
    strange = (
        field(7, varint(300), 0)
        + field(17, b"12345678", 1)
        + field(6, b"1234", 5)
        + field(5000, b"x")
        + group
    )
    value = strange + field(3, strange + field(1, varint(4)) + strange) + strange
    inner = field(1, strange + field(2, value) + strange + field(1, b"n") + strange)
    assert decode(strange + field(1, strange + inner + strange) + strange)["n"].tolist() == [4]


def test_of_what_comes_twice_the_last_one_counts() -> None:
    ints, text = field(3, field(1, varint(1))), field(1, field(1, b"x"))
    assert decode(example(b"n", ints + text)) == {"n": [b"x"]}
    assert decode(example(b"n", text) + example(b"n", ints))["n"].tolist() == [1]
    assert decode(example(b"n", ints + ints))["n"].tolist() == [1, 1]


@pytest.mark.parametrize(
    "content",
    [
        b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",  # a length of 2^64 - 1
        b"\x80" * 20,  # a number without an end
        b"\x00",  # field number 0
        b"\x0b" * 5000,  # groups in groups without an end
        b"\x0c",  # the end of a group that never began
        example(b"n", field(2, field(1, b"12345"))),  # floats of 5 bytes
        example(b"n", field(3, field(1, b"\x80" * 100))),  # a long list whose number does not end
        example(b"n", field(3, field(1, b"\x80" * 99 + b"\x01"))),  # a number of 100 bytes
        example(b"\xff", field(3, field(1, b"\x01"))),  # a name that is not UTF-8
    ],
)
def test_malformed_is_a_value_error(content: bytes) -> None:
    with pytest.raises(ValueError):
        decode(content)
