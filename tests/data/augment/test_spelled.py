"""Transforms from text, against the same ones made by hand."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from allstep.data import ArraySource, Cutmix, Loader, Mixup, Transform
from allstep.data.augment import Flip, PadAndCrop
from allstep.data.augment.parse import check_mix, spelled, spelled_mix
from allstep.errors import ConfigError


def batch_of(transform: Transform) -> tuple[torch.Tensor, torch.Tensor]:
    images = np.random.default_rng(0).integers(0, 256, (12, 8, 8, 3), np.uint8)
    loader = Loader(ArraySource(images, np.arange(12) % 3), transform, batch=12, seed=5, workers=0)
    batch = next(iter(loader.batches(24)))
    return batch.data, batch.target


def test_a_spelled_chain_does_what_the_one_made_by_hand_does() -> None:
    written = spelled(
        'PadAndCrop(8, pad=2, mode="reflect"), Flip(alternating=True)',
        batch=spelled_mix("Mixup(0.4), Cutmix(1.0)"),
    )
    made = Transform(
        PadAndCrop(8, 2, "reflect"), Flip(alternating=True), batch=[Mixup(0.4), Cutmix(1.0)]
    )
    written.num_classes = made.num_classes = 3
    assert repr(written) == repr(made)
    for ours, theirs in zip(batch_of(written), batch_of(made), strict=True):
        assert torch.equal(ours, theirs)


def test_none_is_an_empty_chain() -> None:
    for text in ("none", " none ", ""):
        assert spelled(text).operations == ()
        assert spelled_mix(text) == []
    assert spelled("none", channels=1, shape=(8, 9, 1)).shape == (8, 9, 1)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Mixup(0.2)", "Mixup works on whole batches: write it in data.mix"),
        ("Operation()", "no operation is called 'Operation'"),
        ("Flip(p=open)", "expected plain values in the brackets"),
        ("] + [", "expected operations such as"),
    ],
)
def test_what_cannot_be_spelled(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        spelled(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Flip()", "Flip works on single images: write it in data.augment"),
        ("Mixupp(1)", "did you mean 'Mixup'"),
        ("Mixup(-1)", "alpha of Mixup must be above 0, not -1"),
        ("Mixup()", "Mixup.*alpha"),
        ("imagenet", "no operation is called 'imagenet'"),
    ],
)
def test_what_cannot_be_mixed(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        spelled_mix(text)


@pytest.mark.usefixtures("processes")
def test_looking_needs_no_torch() -> None:
    code = (
        "import sys\nfrom allstep.data.augment.parse import check_mix, spelled\n"
        "spelled('Flip()'); check_mix('Mixup(0.2)')\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)
    assert [call.name for call in check_mix("Cutmix(1.0), Mixup(0.2)")] == ["Cutmix", "Mixup"]


def test_a_chain_has_at_most_100_operations() -> None:
    assert len(spelled("Flip()," * 100).operations) == 100
    with pytest.raises(
        ConfigError, match=r"expected at most 100 operations, found 20,000: 'Flip\(\),"
    ) as caught:
        spelled("Flip()," * 20_000)
    assert len(str(caught.value)) < 300
    with pytest.raises(ConfigError, match=r"at most 100 operations, found 101"):
        check_mix("Mixup(0.2)," * 101)
