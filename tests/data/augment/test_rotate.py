"""Rotation. Reference: Pillow's Image.rotate."""

import numpy as np
import pytest
from PIL import Image

from allstep.data.augment import Rotate
from allstep.data.random.draws import Draws
from allstep.errors import ConfigError
from support.synthetic_photos import distance, scene


@pytest.mark.parametrize("angle", [-90, -33.3, 0, 7, 45, 180])
@pytest.mark.parametrize("channels", [1, 3])
def test_as_pillows_rotate(angle: float, channels: int) -> None:
    """Under half a level on average where both see the image; at the border Pillow does not blend
    with the outside."""
    image = scene(60, 60, channels=channels, grain=2)
    unrotated = Image.fromarray(image if channels == 3 else image[..., 0])
    wanted = np.asarray(unrotated.rotate(angle, Image.Resampling.BILINEAR)).reshape(image.shape)
    found = Rotate(180).one(image.copy(), np.array([float(angle)]))
    inside = slice(12, 48)
    assert distance(found[inside, inside], wanted[inside, inside]) < 0.6
    assert distance(found, wanted) < 4


def test_what_comes_in_from_outside_is_filled() -> None:
    turned = Rotate(45, fill=77).one(scene(40, 40), np.array([45.0]))
    assert (turned[0, 0] == 77).all() and (turned[-1, -1] == 77).all()


def test_angles_are_drawn_from_their_range() -> None:
    angles = Rotate((10, 20)).draw(Draws(0, 0, np.arange(500)), "x")
    assert 10 <= angles.min() < 10.2 and 19.8 < angles.max() < 20
    assert Rotate(15).draw(Draws(0, 0, np.arange(500)), "x").min() < -14


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ConfigError, match="level from 0 to 255, not 300"):
        Rotate(10, fill=300)
    with pytest.raises(ConfigError, match="degrees of Rotate"):
        Rotate(-10)
