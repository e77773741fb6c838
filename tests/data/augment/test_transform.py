"""Chains of operations: the same image whoever makes it, one by one or many at once.

Reference: `one`, and the steps by hand.
"""

import functools
import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from allstep.data import Mixup, Normalize, Transform
from allstep.data.augment import (
    Brightness,
    CentreCrop,
    ColourJitter,
    Contrast,
    Cutout,
    Erase,
    Flip,
    Hue,
    Operation,
    PadAndCrop,
    RandomResizedCrop,
    Resize,
    Rotate,
    Saturation,
)
from allstep.errors import ConfigError
from support.synthetic_photos import Pixels, encoded, scene

JPEG = encoded(scene(60, 80))
SMALL: list[Operation] = [
    PadAndCrop(),
    PadAndCrop(pad=2, mode="reflect"),
    PadAndCrop((10, 9), pad=1),
    Flip(),
    Flip(alternating=True),
    Cutout(5),
    Erase(),
    Brightness(0.5),
    Contrast(0.5),
    Saturation(0.5),
    Hue(0.2),
    ColourJitter(0.3, 0.3, 0.3, 0.1),
    Rotate(30),
]


def one_by_one(
    transform: Transform, data: Any, samples: Any, seed: int = 0, epoch: int = 0
) -> Pixels:
    draws = transform.draw(seed, epoch, np.asarray(samples))
    shape = transform.shape or (data[0].shape if data[0].ndim == 3 else (*data[0].shape, 1))
    out = np.full((len(samples), *shape), 99, np.uint8)
    for row, each in enumerate(data):
        transform.one(each, out[row], draws, row)
    return out


def keep(image: Pixels) -> Pixels:
    return image


def noisy(image: Pixels, rng: np.random.Generator) -> Pixels:
    return rng.integers(0, 256, image.shape, dtype=np.uint8)


@given(
    operations=st.lists(st.sampled_from(SMALL), max_size=4),
    channels=st.sampled_from([1, 3]),
    flat=st.booleans(),
    seed=st.integers(0, 2**40),
    epoch=st.integers(0, 50),
)
def test_many_gives_bit_for_bit_what_one_gives(
    operations: list[Operation], channels: int, flat: bool, seed: int, epoch: int
) -> None:
    transform = Transform(*operations, channels=channels)
    images = np.stack([scene(12, 11, number, channels) for number in range(5)])
    data = images[..., 0] if flat and channels == 1 else images
    samples = np.array([7, 3, 2**33, 0, 12])
    wanted = one_by_one(transform, data, samples, seed, epoch)
    before, out = data.copy(), np.full_like(wanted, 99)
    assert transform.many(data, out, transform.draw(seed, epoch, samples))
    assert np.array_equal(out, wanted)
    assert np.array_equal(data, before)  # what is stored is not touched


@pytest.mark.parametrize("frozen", [False, True])
def test_what_is_stored_is_never_written_to(frozen: bool) -> None:
    data = scene(12, 11)
    data.flags.writeable = not frozen
    for operation in SMALL:
        if operation.resizes() is None:
            one_by_one(Transform(operation), [data], [4])
    assert np.array_equal(data, scene(12, 11))


@pytest.mark.parametrize(
    ("transform", "shape"),
    [
        (Transform(RandomResizedCrop(10)), (10, 10, 3)),
        (Transform(Flip(), PadAndCrop((10, 8)), channels=1), (10, 8, 1)),
        (Transform(Flip(), PadAndCrop()), None),
        (Transform(), None),
        (Transform(CentreCrop(10), keep), (10, 10, 3)),
        (Transform(Resize(10), keep, shape=(4, 4, 3)), (4, 4, 3)),
    ],
)
def test_the_shape_of_what_comes_out(
    transform: Transform, shape: tuple[int, int, int] | None
) -> None:
    assert transform.shape == shape


def test_where_many_cannot_it_says_so() -> None:
    data, out = scene(12, 11)[None], np.zeros((1, 10, 10, 3), np.uint8)
    for transform in (Transform(Resize(10)), Transform(keep), Transform(PadAndCrop(10), keep)):
        assert not transform.many(data, out, transform.draw(0, 0, np.arange(1)))
    crop = Transform(PadAndCrop(10))
    assert not crop.many(data.astype(np.float32), out, crop.draw(0, 0, np.arange(1)))
    assert not crop.many(data[..., :1], out, crop.draw(0, 0, np.arange(1)))


def test_the_same_image_in_any_batch() -> None:
    transform = Transform(
        RandomResizedCrop(20), Flip(), ColourJitter(0.4, 0.4, 0.4, 0.1), Rotate(10), Erase(), noisy
    )
    whole = one_by_one(transform, [JPEG] * 12, np.arange(12), seed=5, epoch=2)
    for ranks in (2, 3):
        shares = [
            one_by_one(transform, [JPEG] * (12 // ranks), np.arange(rank, 12, ranks), 5, 2)
            for rank in range(ranks)
        ]
        together = np.empty_like(whole)
        for rank in range(ranks):
            together[rank::ranks] = shares[rank]
        assert np.array_equal(together, whole)


def test_epochs_and_seeds_differ() -> None:
    transform = Transform(RandomResizedCrop(20))
    first = one_by_one(transform, [JPEG], [0])
    assert not np.array_equal(first, one_by_one(transform, [JPEG], [0], epoch=1))
    assert not np.array_equal(first, one_by_one(transform, [JPEG], [0], seed=1))


def test_another_operation_does_not_change_the_draws_of_the_first() -> None:
    few, more = Transform(Erase(), Flip()), Transform(Flip(), Rotate(3), Erase(), Flip())
    a, b = few.draw(0, 0, np.arange(9)).parameters, more.draw(0, 0, np.arange(9)).parameters
    assert np.array_equal(a[0], b[2]) and np.array_equal(a[1], b[0])
    assert not np.array_equal(b[0], b[3])  # two of a kind draw each for itself


def test_grey_sets_come_out_as_asked() -> None:
    grey = scene(12, 11, channels=1)[..., 0]
    assert np.array_equal(one_by_one(Transform(channels=1), [grey], [0])[0, ..., 0], grey)
    three = one_by_one(Transform(PadAndCrop((12, 11), pad=0)), [grey], [0])[0]
    assert np.array_equal(three, np.repeat(grey[..., None], 3, axis=2))


def test_a_users_function_gets_a_generator_when_it_wants_one() -> None:
    assert np.array_equal(
        one_by_one(Transform(Resize((60, 80)), keep), [JPEG], [0]),
        one_by_one(Transform(Resize((60, 80))), [JPEG], [0]),
    )
    first = one_by_one(Transform(Resize(20), noisy), [JPEG] * 2, [0, 1])
    assert np.array_equal(first, one_by_one(Transform(Resize(20), noisy), [JPEG] * 2, [0, 1]))
    assert not np.array_equal(first[0], first[1])
    fixed = Transform(Resize(20), functools.partial(noisy, rng=np.random.default_rng(0)))
    assert one_by_one(fixed, [JPEG], [0]).shape == (1, 20, 20, 3)


def test_a_users_function_holds_the_lock() -> None:
    assert Transform(RandomResizedCrop(20), Flip()).releases_gil
    assert not Transform(RandomResizedCrop(20), keep).releases_gil


@pytest.mark.parametrize(
    ("function", "error", "says"),
    [
        (
            lambda image: image / 255,
            ConfigError,
            r"<lambda> gave a float64 array of shape \(20, 20, 3\)",
        ),
        (lambda image: None, ConfigError, "<lambda> gave a NoneType"),
        (
            lambda image: image[:5],
            ConfigError,
            r"after <lambda> an image is \(5, 20, 3\), the batch has room for \(20, 20, 3\)",
        ),
        (
            lambda image: image.reshape(7),
            RuntimeError,
            r"<lambda> failed on an image of shape \(20, 20, 3\)",
        ),
    ],
)
def test_a_users_function_that_goes_wrong_is_named(
    function: Any, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        one_by_one(Transform(Resize(20), function), [JPEG], [0])


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Transform(Flip), r"write Flip\(\.\.\.\)"),
        (lambda: Transform("flip"), "neither an operation nor a function"),  # type: ignore[arg-type]
        (lambda: Transform(Normalize(0, 1)), r"works on batches: Transform\(\.\.\., batch="),
        (lambda: Transform(batch=[Flip()]), "works on images, not on batches"),  # type: ignore[list-item]
        (lambda: Transform(batch=[3]), "not an operation on batches"),  # type: ignore[list-item]
        (lambda: Transform(channels=4), "3 channels .* not 4"),
        (lambda: Transform(lambda a, b, c: a), "wants 3 arguments"),
    ],
)
def test_wrong_arguments_are_named(make: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make()


def test_images_of_other_sizes_need_a_crop() -> None:
    transform, out = Transform(Flip()), np.zeros((20, 20, 3), np.uint8)
    with pytest.raises(ValueError, match="begin with a crop or Resize"):
        transform.one(JPEG, out, transform.draw(0, 0, np.arange(1)), 0)


def test_a_transform_pickles_with_functions_of_any_kind() -> None:
    shift = 3
    transform = Transform(
        RandomResizedCrop(20),
        noisy,
        lambda image: image + np.uint8(shift),
        batch=[Normalize(0.5, 0.2), Mixup(1.0)],
    )
    copy = pickle.loads(pickle.dumps(transform))
    assert repr(copy) == repr(transform) and copy.shape == transform.shape
    assert np.array_equal(one_by_one(copy, [JPEG], [4]), one_by_one(transform, [JPEG], [4]))


def test_it_says_what_it_does() -> None:
    transform = Transform(
        CentreCrop(56), Flip(), keep, batch=[Normalize((0.5,), (0.2,))], channels=1
    )
    assert (
        transform.describe()
        == "CentreCrop(size=(56, 56), shorter=64) > Flip(p=0.5, alternating=False) > keep >"
        " Normalize((0.5,), (0.2,))"
    )
    assert repr(transform).startswith("Transform(CentreCrop(") and repr(transform).endswith(
        "channels=1)"
    )
    assert Transform().describe() == "images as they are"


def test_the_batch_part_runs_in_order() -> None:
    transform = Transform(batch=[Mixup(1.0), Normalize(0.5, 0.25)])
    transform.num_classes = 4
    data, target = torch.full((3, 1, 2, 2), 255, dtype=torch.uint8), torch.tensor([0, 1, 3])
    images, soft = transform.on_batch(data, target, transform.draw(0, 0, np.arange(3)))
    assert torch.allclose(images, torch.full((3, 1, 2, 2), 2.0))
    assert soft.shape == (3, 4)
    assert Transform().on_batch(data, target, transform.draw(0, 0, np.arange(3))) == (data, target)


@pytest.mark.usefixtures("processes")
def test_images_need_no_torch() -> None:
    """A worker process that only makes images should not pay for importing torch."""
    code = (
        "import sys, allstep.data.augment.transform, allstep.data.augment; sys.exit('torch' in"
        " sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=50).returncode == 0
