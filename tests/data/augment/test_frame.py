"""Crops. References: torchvision's procedure written out slowly, Pillow's reduction."""

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from allstep.data.augment import CentreCrop, Cutout, PadAndCrop, RandomResizedCrop, Resize
from allstep.data.image.resize import resized
from allstep.data.random.draws import Draws, Floats
from allstep.errors import ConfigError
from support.synthetic_photos import distance, scene

SIDES = st.integers(1, 3000)


def table(frame: RandomResizedCrop, n: int = 1, seed: int = 0) -> Floats:
    return frame.draw(Draws(seed, 0, np.arange(n)), "crop")


@given(
    height=SIDES,
    width=SIDES,
    seed=st.integers(0, 1000),
    area=st.sampled_from([(0.08, 1.0), (0.5, 0.5), (1e-5, 1e-4)]),
)
def test_a_random_crop_lies_within_the_image(
    height: int, width: int, seed: int, area: tuple[float, float]
) -> None:
    frame = RandomResizedCrop(24, area)
    top, left, h, w = frame.region(height, width, table(frame, seed=seed)[0])
    assert 0 <= top <= top + h <= height and 0 <= left <= left + w <= width
    assert h > 0 and w > 0


@given(height=SIDES, width=SIDES, seed=st.integers(0, 1000))
def test_the_first_try_that_fits_is_taken(height: int, width: int, seed: int) -> None:
    """Against torchvision's get_params, written out for the same uniform numbers."""
    frame = RandomResizedCrop(24)
    numbers = Draws(seed, 0, np.arange(1)).uniform("crop", frame.num_draws)[0]
    found = frame.region(height, width, table(frame, seed=seed)[0])
    for i in range(10):
        area = height * width * (0.08 + numbers[i] * 0.92)
        aspect = np.exp(np.log(3 / 4) + numbers[10 + i] * (np.log(4 / 3) - np.log(3 / 4)))
        w, h = np.sqrt(area * aspect), np.sqrt(area / aspect)
        if 0 < round(w) <= width and 0 < round(h) <= height:
            assert abs(found.height - h) <= 0.51 and abs(found.width - w) <= 0.51
            return
    assert (found.height, found.width) == _middle(height, width)


def _middle(height: int, width: int) -> tuple[int, int]:
    if width / height < 3 / 4:
        return min(height, max(1, round(width / (3 / 4)))), width
    if width / height > 4 / 3:
        return height, min(width, max(1, round(height * (4 / 3))))
    return height, width


def test_area_aspect_and_place_are_spread_evenly() -> None:
    """Of a square image nearly every first try fits, so their distribution shows: means within 5
    standard errors."""
    n = 4000
    frame = RandomResizedCrop(24, (0.1, 0.5))
    regions = np.array([frame.region(1000, 1000, row) for row in table(frame, n)])
    area, aspect = regions[:, 2] * regions[:, 3] / 1e6, regions[:, 3] / regions[:, 2]
    assert abs(area.mean() - 0.3) < 5 * 0.4 / 12**0.5 / n**0.5
    assert abs(np.log(aspect).mean()) < 5 * 0.576 / 12**0.5 / n**0.5
    place = regions[:, 0] / (1000 - regions[:, 2])
    assert abs(place.mean() - 0.5) < 5 / 12**0.5 / n**0.5
    assert place.min() == pytest.approx(0, abs=0.01) and place.max() == pytest.approx(1, abs=0.01)


@given(height=SIDES, width=SIDES)
def test_a_centre_crop_is_in_the_middle(height: int, width: int) -> None:
    top, left, h, w = CentreCrop(224).region(height, width, np.empty(0))
    assert h == w and abs(h - min(height, width) * 0.875) <= 1
    assert abs(top - (height - h) / 2) <= 0.5 and abs(left - (width - w) / 2) <= 0.5


def test_a_centre_crop_looks_like_pillows() -> None:
    """Reference: shorter side to 64 by Pillow, then 56 x 56 out of its middle."""
    image = scene(120, 160, grain=2)
    smaller = Image.fromarray(image).resize((85, 64), Image.Resampling.BILINEAR)
    wanted = np.asarray(smaller)[4:60, 14:70]
    assert (
        distance(CentreCrop(56, shorter=64).one(image, np.empty(0)), wanted) < 5
    )  # up to half a pixel apart


@pytest.mark.parametrize("factor", [0.5, 1, 1.3, 1.7, 2, 2.5, 4, 7])
def test_resizing_looks_like_pillows(factor: float) -> None:
    """Against Pillow's antialiased bilinear: under 2.5 levels on average, 5 where shapes shrink to
    three pixels; nearer than OpenCV's."""
    side = int(64 * factor)
    image = scene(side, side + 10, grain=3)
    wanted = np.asarray(Image.fromarray(image).resize((80, 64), Image.Resampling.BILINEAR))
    found = distance(resized(image, (64, 80)), wanted)
    assert found < (1 if factor <= 0.5 else 2.5 if factor < 5 else 5)
    assert factor < 3 or found < 0.7 * distance(
        np.asarray(cv2.resize(image, (80, 64)), np.uint8), wanted
    )


def test_resize_takes_all() -> None:
    assert Resize((20, 30)).region(77, 99, np.empty(0)) == (0, 0, 77, 99)
    assert Resize((20, 30)).one(scene(77, 99), np.empty(0)).shape == (20, 30, 3)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: RandomResizedCrop(0), "number of pixels"),
        (lambda: RandomResizedCrop((1, 2, 3)), "number of pixels"),  # type: ignore[arg-type]
        (lambda: RandomResizedCrop(24, (0.5, 0.1)), r"within 1e-06 and 1.0, not \(0.5, 0.1\)"),
        (lambda: RandomResizedCrop(24, 0.5), "is a pair"),  # type: ignore[arg-type]
        (lambda: CentreCrop(224, shorter=200), "out of a shorter side of 200"),
        (lambda: Resize(4_000_000_000), "at most 100,000,000 pixels in all, found 4000000000"),
        (lambda: CentreCrop((1, 10**20)), "at most 100,000,000 pixels"),
        (
            lambda: PadAndCrop(32, pad=1.5),
            "the pad of PadAndCrop is a whole number from 0 to 1000, not 1.5",
        ),  # type: ignore[arg-type]
        (lambda: PadAndCrop(32, pad=10**10), "from 0 to 1000"),
        (lambda: PadAndCrop(32, pad=-1), "from 0 to 1000"),
        (lambda: Cutout(1.5), "the size of Cutout is a whole number from 1"),  # type: ignore[arg-type]
        (lambda: Cutout(0), "the size of Cutout is a whole number from 1"),
    ],
)
def test_wrong_arguments_are_named(make: object, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make()  # type: ignore[operator]


def test_numpys_integers_are_sizes() -> None:
    assert RandomResizedCrop(np.int64(224)).size == RandomResizedCrop(224).size == (224, 224)  # type: ignore[arg-type]
    assert Resize((np.int32(5), np.uint8(7))).size == (5, 7)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [224.0, "224", None, (1, 2, 3), (224, 0.5), ()])
def test_sizes_that_are_none_are_named(size: object) -> None:
    with pytest.raises(ConfigError, match="number of pixels"):
        CentreCrop(size)  # type: ignore[arg-type]
