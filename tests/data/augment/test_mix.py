"""Mixup and cutmix.

References: numpy's own beta distribution, and the definitions written out sample by sample.
"""

import numpy as np
import pytest
import torch

from allstep.data.augment.mix import Cutmix, Mixup
from allstep.data.augment.transform import Transform
from allstep.data.random.draws import Draws
from allstep.errors import ConfigError

DRAWS = Draws(3, 1, np.arange(40))


def batch(n: int = 40, dtype: torch.dtype = torch.uint8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    data = torch.randint(0, 256, (n, 9, 11, 3), generator=generator, dtype=torch.uint8).permute(
        0, 3, 1, 2
    )
    return data.to(dtype), torch.arange(n) % 7


@pytest.mark.parametrize("alpha", [0.1, 0.2, 0.5, 1.0, 2.0, 8.0])
def test_lam_is_beta_distributed(alpha: float) -> None:
    """Kolmogorov-Smirnov distance to 100,000 draws of numpy; 0.01 would be six standard deviations
    off."""
    found = np.sort(Mixup(alpha).lam((np.arange(20_000) + 0.5) / 20_000))
    wanted = np.sort(np.random.default_rng(0).beta(alpha, alpha, 100_000))
    places = np.searchsorted(found, wanted) / len(found)
    apart = wanted < 1 - 1e-9  # a good part of Beta(0.1, 0.1) is 1 as far as floats can tell
    assert np.abs(places - np.arange(100_000) / 100_000)[apart].max() < 0.01
    assert np.allclose(found, 1 - found[::-1])
    assert found.min() >= 0 and found.max() <= 1


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_mixup_blends_with_the_sample_before(dtype: torch.dtype) -> None:
    data, target = batch(dtype=dtype)
    found, soft = Mixup(0.4, 7)(data, target, DRAWS, "Mixup")
    lam = Mixup(0.4).lam(DRAWS.uniform("Mixup", 1)[:, 0])
    for i in range(40):
        wanted = lam[i] * data[i].double() + (1 - lam[i]) * data[i - 1].double()
        assert torch.allclose(found[i].double(), wanted, atol=1e-3)
        classes = torch.zeros(7, dtype=torch.double)
        classes[target[i]] += lam[i]
        classes[target[i - 1]] += 1 - lam[i]
        assert torch.allclose(soft[i].double(), classes, atol=1e-6)
    assert found.dtype == torch.float32


def test_cutmix_puts_a_box_of_the_sample_before() -> None:
    data, target = batch()
    found, soft = Cutmix(1.0, 7)(data, target, DRAWS, "Cutmix")
    assert found.dtype == torch.uint8
    for i in range(40):
        other = (found[i] != data[i]).any(0)
        rows, columns = other.any(1).nonzero(), other.any(0).nonzero()
        if len(rows):
            box = (
                slice(None),
                slice(int(rows[0]), int(rows[-1]) + 1),
                slice(int(columns[0]), int(columns[-1]) + 1),
            )
            assert torch.equal(found[i][box], data[i - 1][box])
            share = 1 - found[i][box][0].numel() / 99
        else:
            share = 1.0
        assert float(soft[i, target[i]]) == pytest.approx(
            share, abs=0.03
        )  # equal pixels may hide an edge of the box
        assert float(soft[i].sum()) == pytest.approx(1)


def test_the_box_of_cutmix_has_the_area_that_lam_leaves() -> None:
    """Boxes that are not cut off at the border: within the rounding of their sides."""
    data, target, draws = (
        torch.zeros(500, 1, 64, 64),
        torch.arange(500) % 2,
        Draws(0, 0, np.arange(500)),
    )
    found, soft = Cutmix(1.0, 2)(torch.arange(500.0).view(-1, 1, 1, 1) + data, target, draws, "x")
    lam = Cutmix(1.0).lam(draws.uniform("x", 3)[:, 0])
    mixed = (found != torch.arange(500.0).view(-1, 1, 1, 1)).float().mean((1, 2, 3)).numpy()
    assert (mixed <= 1 - lam + 1e-6).all()
    assert np.abs(mixed - (1 - soft[torch.arange(500), target].numpy())).max() < 1e-6
    assert (np.abs(mixed - (1 - lam)) < 0.04).sum() > 100


def test_lam_belongs_to_the_sample() -> None:
    data, target = batch(4)
    few, many = Draws(0, 0, np.array([5, 9, 2, 3])), Draws(0, 0, np.array([1, 9, 8, 5]))
    lam = [Mixup(1.0).lam(draws.uniform("m", 1)[:, 0]) for draws in (few, many)]
    assert lam[0][0] == lam[1][3] and lam[0][1] == lam[1][1]
    assert Mixup(1.0, 7)(data, target, few, "m")[1].shape == (4, 7)


@pytest.mark.parametrize("kind", [Mixup, Cutmix])
@pytest.mark.parametrize("n", [0, 1])
def test_a_share_of_one_or_none(kind: type, n: int) -> None:
    data, target = batch(n)
    found, soft = kind(1.0, 7)(data, target, Draws(0, 0, np.arange(n)), "m")
    assert found.shape == data.shape and soft.shape == (n, 7)
    assert torch.allclose(found.float(), data.float(), atol=1e-3)  # mixed with itself


def test_one_after_the_other_soft_targets_stay_soft() -> None:
    data, target = batch()
    transform = Transform(batch=[Mixup(0.2, 7), Cutmix(1.0, 7)])
    _, soft = transform.on_batch(data, target, DRAWS)
    assert soft.shape == (40, 7) and torch.allclose(soft.sum(1), torch.ones(40))


def test_classes_come_from_the_transform_or_it_says_what_to_do() -> None:
    data, target = batch()
    transform = Transform(batch=[Mixup(0.2)])
    with pytest.raises(ConfigError, match=r"number of classes: Mixup\(0\.2, num_classes=\.\.\.\)"):
        transform.on_batch(data, target, DRAWS)
    transform.num_classes = 9
    assert transform.on_batch(data, target, DRAWS)[1].shape == (40, 9)


def test_wrong_arguments_are_named() -> None:
    data, target = batch()
    with pytest.raises(ConfigError, match="above 0, not 0"):
        Mixup(0)
    with pytest.raises(ConfigError, match="at least 1 class"):
        Cutmix(1.0, 0)
    with pytest.raises(ConfigError, match="targets 0 to 6 are not all classes"):
        Mixup(1.0, 5)(data, target, DRAWS, "m")
    with pytest.raises(ConfigError, match=r"not \(40, 2\)"):
        Mixup(1.0, 5)(data, target.repeat(2, 1).T, DRAWS, "m")
