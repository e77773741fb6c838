"""Flips. Reference: numpy's slice backwards."""

import numpy as np
import pytest

from allstep.data.augment import Flip
from allstep.data.random.draws import Draws, Floats
from allstep.errors import ConfigError
from support.synthetic_photos import scene


def flipped(operation: Flip, epoch: int, n: int = 1000, seed: int = 0) -> Floats:
    return operation.draw(Draws(seed, epoch, np.arange(n)), "Flip")[:, 0]


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("width", [1, 13, 14, 224])
def test_a_flip_is_the_mirror_image(channels: int, width: int) -> None:
    image = scene(11, width, channels=channels)
    assert np.array_equal(Flip().one(image.copy(), np.array([1.0])), image[:, ::-1])
    assert np.array_equal(Flip().one(image.copy(), np.array([0.0])), image)
    gaps = np.repeat(image, 2, axis=1)[:, ::2]
    assert np.array_equal(Flip().one(gaps, np.array([1.0])), image[:, ::-1])


@pytest.mark.parametrize("p", [0.0, 0.2, 0.5, 1.0])
def test_a_coin_decides(p: float) -> None:
    share = flipped(Flip(p), 0).mean()
    assert abs(share - p) <= 5 * (p * (1 - p) / 1000) ** 0.5
    assert p in (0, 1) or not np.array_equal(flipped(Flip(p), 0), flipped(Flip(p), 1))


def test_alternating_flips_every_second_epoch_and_half_of_the_samples_first() -> None:
    by_epoch = [flipped(Flip(alternating=True), epoch) for epoch in range(4)]
    assert np.array_equal(by_epoch[0], by_epoch[2]) and np.array_equal(by_epoch[1], by_epoch[3])
    assert np.array_equal(by_epoch[0], 1 - by_epoch[1])
    assert abs(by_epoch[0].mean() - 0.5) < 0.08  # 5 standard deviations
    assert not np.array_equal(by_epoch[0], flipped(Flip(alternating=True), 0, seed=1))


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ConfigError, match=r"from 0 to 1, not 1\.5"):
        Flip(1.5)
    with pytest.raises(ConfigError, match="has no meaning"):
        Flip(0.3, alternating=True)
