"""Cutout and random erasing.

Reference: the rectangle painted pixel by pixel, and the shares they should have.
"""

import numpy as np
import pytest

from allstep.data.augment import Cutout, Erase
from allstep.data.random.draws import Draws
from allstep.errors import ConfigError
from support.synthetic_photos import scene


@pytest.mark.parametrize("size", [1, 4, 7])
def test_cutout_paints_a_square_around_a_pixel(size: int) -> None:
    operation = Cutout(size, value=(1, 2, 3))
    for row in operation.draw(Draws(0, 0, np.arange(50)), "x"):
        middle = int(row[0] * 15), int(row[1] * 20)
        wanted = scene(15, 20)
        for y, x in np.ndindex(15, 20):
            if (
                -(size // 2) <= y - middle[0] < size - size // 2
                and -(size // 2) <= x - middle[1] < size - size // 2
            ):
                wanted[y, x] = 1, 2, 3
        assert np.array_equal(operation.one(scene(15, 20), row), wanted)


def test_erase_paints_one_rectangle_of_the_right_area() -> None:
    operation = Erase(p=1, area=(0.1, 0.3), aspect=(0.5, 2), value=255)
    areas = []
    for row in operation.draw(Draws(0, 0, np.arange(400)), "x"):
        painted = operation.one(np.zeros((60, 80, 3), np.uint8), row)[..., 0] == 255
        rows, columns = painted.any(1).sum(), painted.any(0).sum()
        assert painted.sum() == rows * columns  # one rectangle, and all of it
        assert 0.45 < rows / columns < 2.2
        areas.append(painted.mean())
    assert min(areas) > 0.09 and max(areas) < 0.31
    assert abs(np.mean(areas) - 0.2) < 5 * 0.2 / 12**0.5 / 20


def test_erase_happens_with_its_probability() -> None:
    operation = Erase(p=0.25)
    table = operation.draw(Draws(0, 0, np.arange(2000)), "x")
    assert (
        abs(np.mean([operation.rectangle(50, 50, row) is not None for row in table]) - 0.25)
        < 5 * 0.433 / 2000**0.5
    )


def test_a_rectangle_that_never_fits_leaves_the_image_alone() -> None:
    operation = Erase(p=1, area=(0.9, 1.0), aspect=(3, 3))
    row = operation.draw(Draws(0, 0, np.arange(1)), "x")[0]
    assert np.array_equal(operation.one(scene(20, 20), row), scene(20, 20))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Cutout(0), "a whole number from 1 to 1000000, not 0"),
        (lambda: Cutout(8, value=300), "level from 0 to 255"),
        (lambda: Erase(p=2), "p of Erase"),
        (lambda: Erase(area=(0.5, 1.5)), "area of Erase"),
    ],
)
def test_wrong_arguments_are_named(make: object, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make()  # type: ignore[operator]
