"""Synthetic images.

The reference is the same source made again, and Pillow for what is encoded.
"""

import io
import pickle

import numpy as np
import pytest
from PIL import Image

from allstep.data.opening import open_source
from allstep.data.sources.synthetic import SyntheticSource
from allstep.errors import ConfigError


def test_images_depend_on_their_number_alone() -> None:
    one, two = SyntheticSource(1000, 16, 24, variety=8), SyntheticSource(1000, 16, 24, variety=8)
    assert [one.read(number).data for number in range(9)] == [
        two.read(number).data for number in range(9)
    ]
    assert len({one.read(number).data for number in range(1000)}) == 8
    assert pickle.loads(pickle.dumps(one)).read(5).data == one.read(5).data
    assert (
        SyntheticSource(10, 16, seed=1).read(0).data != SyntheticSource(10, 16, seed=2).read(0).data
    )


@pytest.mark.parametrize(("channels", "mode"), [(1, "L"), (3, "RGB")])
def test_encoded_images_are_jpegs_of_that_size(channels: int, mode: str) -> None:
    source = SyntheticSource(100, 30, 40, channels=channels, num_classes=7)
    image = Image.open(io.BytesIO(source.read(99).data))
    assert image.format == "JPEG" and image.size == (40, 30) and image.mode == mode
    assert source.read(99).target == 1 and source.block(np.array([1])) is None
    assert source.targets().tolist() == [number % 7 for number in range(100)]


def test_decoded_images_come_in_blocks() -> None:
    source = SyntheticSource(100, 8, encoded=False, variety=16, num_classes=10)
    numbers = np.array([3, 99, 19])
    block = source.block(numbers)
    assert block is not None and block.target.tolist() == [3, 9, 9]
    assert all(
        np.array_equal(block.data[row], source.read(number).data)
        for row, number in enumerate(numbers.tolist())
    )
    assert block.data.shape == (3, 8, 8, 3) and source.place(99).offset == 99
    with pytest.raises(IndexError):
        source.block(np.array([100]))


def test_sizes_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="0 of 8x8x3"):
        SyntheticSource(0, 8)
    with pytest.raises(ConfigError, match="8x8x2"):
        SyntheticSource(1, 8, channels=2)


def test_a_synthetic_source_is_opened_by_its_name() -> None:
    source = open_source("synthetic:7x20x30")
    assert len(source) == 7 and Image.open(io.BytesIO(source.read(0).data)).size == (30, 20)
    assert Image.open(io.BytesIO(open_source("synthetic:2x16").read(0).data)).size == (16, 16)
    assert len(open_source("synthetic:1000")) == 1000
    for wrong in (
        "synthetic:",
        "synthetic:1000x",
        "synthetic:1x2x3x4",
        "synthetic:-1x8",
        "synthetic:many",
        "synthetic:" + "9" * 5000,
    ):
        with pytest.raises(ConfigError, match="expected synthetic:NUMBERxHEIGHTxWIDTH"):
            open_source(wrong)
    with pytest.raises(ConfigError, match="0 of 8x8x3"):
        open_source("synthetic:0x8")
