"""Colour. References: Pillow's ImageEnhance, and colorsys for hues."""

import colorsys
from itertools import permutations

import numpy as np
import pytest
from PIL import Image, ImageEnhance

from allstep.data.augment import Brightness, ColourJitter, Contrast, Hue, Saturation
from allstep.data.augment.operation import Operation
from allstep.data.random.draws import Draws
from allstep.errors import ConfigError
from support.synthetic_photos import Pixels, distance, scene

FACTORS = [0.0, 0.3, 0.77, 1.0, 1.4, 2.5]
PILLOWS = {
    Brightness: ImageEnhance.Brightness,
    Contrast: ImageEnhance.Contrast,
    Saturation: ImageEnhance.Color,
}


def changed(operation: Operation, figure: float, image: Pixels) -> Pixels:
    return operation.one(image.copy(), np.array([figure]))


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("kind", [Brightness, Contrast, Saturation])
def test_as_pillows_image_enhance(kind: type, factor: float) -> None:
    """Brightness exactly; contrast and saturation within what the rounding of grey moves."""
    image = scene(40, 50)
    wanted = np.asarray(PILLOWS[kind](Image.fromarray(image)).enhance(factor))
    found = changed(kind(0.5), factor, image)
    assert (
        np.abs(found.astype(int) - wanted).max()
        <= {Brightness: 0, Contrast: 2, Saturation: 3}[kind]
    )
    assert distance(found, wanted) < 1


@pytest.mark.parametrize("turn", [-0.5, -0.2, 0.0, 0.08, 0.35])
def test_hue_as_colorsys(turn: float) -> None:
    """HSV in 256 steps is coarse: under 2 levels on average, and under 12 anywhere."""
    image = scene(20, 25)
    wanted = np.empty(image.shape)
    for at in np.ndindex(20, 25):
        hue, saturation, value = colorsys.rgb_to_hsv(*(image[at] / 255))
        wanted[at] = colorsys.hsv_to_rgb((hue + turn) % 1, saturation, value)
    difference = np.abs(changed(Hue(0.5), turn, image) - wanted * 255)
    assert difference.mean() < 2 and difference.max() < 12


@pytest.mark.parametrize("operation", [Brightness(0.5), Contrast(0.5), Saturation(0.5)])
def test_a_factor_of_one_changes_nothing(operation: Operation) -> None:
    image = scene(20, 25)
    assert np.array_equal(changed(operation, 1.0, image), image)


@pytest.mark.parametrize("operation", [Saturation(0.5), Hue(0.5)])
def test_grey_images_have_no_colour_to_change(operation: Operation) -> None:
    image = scene(20, 25, channels=1)
    assert np.array_equal(changed(operation, 0.3, image), image)


def test_contrast_of_grey_images_as_pillows() -> None:
    image = scene(20, 25, channels=1)
    wanted = np.asarray(ImageEnhance.Contrast(Image.fromarray(image[..., 0])).enhance(1.5))
    assert np.array_equal(changed(Contrast(0.5), 1.5, image)[..., 0], wanted)


@pytest.mark.parametrize(
    ("operation", "low", "high"),
    [
        (Brightness(0.4), 0.6, 1.4),
        (Contrast((0.8, 1.1)), 0.8, 1.1),
        (Saturation(1.5), 0, 2.5),
        (Hue(0.1), -0.1, 0.1),
    ],
)
def test_figures_are_drawn_evenly_from_their_range(
    operation: Operation, low: float, high: float
) -> None:
    figures = operation.draw(Draws(0, 0, np.arange(3000)), "x")[:, 0]
    assert (
        low <= figures.min() < low + 0.01 * (high - low)
        and high - 0.01 * (high - low) < figures.max() <= high
    )
    assert abs(figures.mean() - (low + high) / 2) < 5 * (high - low) / 12**0.5 / 3000**0.5


def test_jitter_is_its_parts_in_an_order_of_its_own() -> None:
    """Reference: all 24 orders, done by hand."""
    jitter, parts = (
        ColourJitter(0.4, 0.4, 0.4, 0.1),
        (Brightness(0.4), Contrast(0.4), Saturation(0.4), Hue(0.1)),
    )
    table = jitter.draw(Draws(0, 0, np.arange(300)), "x")
    orders = list(permutations(range(4)))
    assert {int(row[4]) for row in table} == set(range(24))
    for row in table[:40]:
        wanted = scene(12, 12)
        for number in orders[int(row[4])]:
            wanted = changed(parts[number], row[number], wanted)
        assert np.array_equal(jitter.one(scene(12, 12), row), wanted)


def test_jitter_by_nothing_changes_nothing() -> None:
    jitter = ColourJitter()
    row = jitter.draw(Draws(0, 0, np.arange(1)), "x")[0]
    assert np.array_equal(jitter.one(scene(12, 12), row), scene(12, 12))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Brightness(-1), "0 or more, not -1"),
        (lambda: Hue(0.6), "strength of Hue must be .* within -0.5 and 0.5"),
        (lambda: Contrast((1.2, 0.8)), "strength of Contrast"),
    ],
)
def test_wrong_arguments_are_named(make: object, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make()  # type: ignore[operator]
