"""Pad and crop. Reference: numpy's pad and a slice."""

import numpy as np
import pytest

from allstep.data.augment import PadAndCrop
from allstep.data.random.draws import Draws
from allstep.errors import ConfigError
from support.synthetic_photos import scene


@pytest.mark.parametrize(("mode", "numpys"), [("zero", "constant"), ("reflect", "reflect")])
@pytest.mark.parametrize("channels", [1, 3])
def test_the_window_is_cut_out_of_numpys_padding(mode: str, numpys: str, channels: int) -> None:
    operation, image = PadAndCrop((20, 18), 3, mode), scene(17, 19, channels=channels)
    table = operation.draw(Draws(0, 0, np.arange(200)), "pad")
    padded = np.pad(image, ((3, 3), (3, 3), (0, 0)), mode=numpys)  # type: ignore[call-overload]
    places = set()
    for row in table:
        top, left = int(row[0] * 4), int(row[1] * 8)
        assert np.array_equal(
            operation.one(image.copy(), row), padded[top : top + 20, left : left + 18]
        )
        places.add((top, left))
    assert len(places) == 4 * 8  # all of them, in 200 goes


def test_without_a_size_the_image_keeps_its_own() -> None:
    assert PadAndCrop(pad=2).one(scene(11, 13), np.array([0.3, 0.9])).shape == (11, 13, 3)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: PadAndCrop(32, mode="zeros"), "no mode 'zeros'; did you mean 'zero'"),
        (lambda: PadAndCrop(32, -1), "a whole number from 0 to 1000, not -1"),
        (
            lambda: PadAndCrop(64).one(scene(32, 32), np.zeros(2)),
            "does not fit images of 32 x 32",
        ),
        (
            lambda: PadAndCrop(pad=5, mode="reflect").one(scene(5, 5), np.zeros(2)),
            "does not fit images of 5 x 5",
        ),
    ],
)
def test_wrong_arguments_are_named(make: object, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make()  # type: ignore[operator]
