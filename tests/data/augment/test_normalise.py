"""Normalisation. Reference: the formula in float64."""

import numpy as np
import pytest
import torch

from allstep.data.augment.normalize import Normalize
from allstep.data.random.draws import Draws
from allstep.errors import ConfigError

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
NONE = Draws(0, 0, np.arange(2))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_as_the_formula_says(dtype: torch.dtype) -> None:
    data = torch.arange(256).repeat(2, 3, 1, 1).to(dtype)
    target = torch.tensor([1, 2])
    found, same = Normalize(MEAN, STD)(data, target, NONE, "")
    wanted = (data.double() / 255 - torch.tensor(MEAN).double().view(3, 1, 1)) / torch.tensor(
        STD
    ).double().view(3, 1, 1)
    assert found.dtype == torch.float32 and same is target
    assert torch.allclose(found.double(), wanted, atol=1e-5)


def test_channels_last_memory_stays_so() -> None:
    data = torch.zeros(2, 4, 5, 3, dtype=torch.uint8).permute(0, 3, 1, 2)
    found, _ = Normalize(0.5, 0.5)(data, torch.zeros(2), NONE, "")
    assert found.is_contiguous(memory_format=torch.channels_last)


def test_other_types_and_empty_batches() -> None:
    found, _ = Normalize(0.5, 0.5, torch.bfloat16)(
        torch.zeros(0, 3, 4, 4, dtype=torch.uint8), torch.zeros(0), NONE, ""
    )
    assert found.dtype == torch.bfloat16 and found.shape == (0, 3, 4, 4)


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ConfigError, match="above 0"):
        Normalize(0.5, 0)
    with pytest.raises(ConfigError, match="3 means but 1"):
        Normalize(MEAN, 0.5)
    with pytest.raises(ConfigError, match="3 channels, the images have 1"):
        Normalize(MEAN, STD)(torch.zeros(2, 1, 4, 4), torch.zeros(2), NONE, "")
    with pytest.raises(
        ConfigError, match=r"scale 0 to 1, not .123.7, 116.3, 103.5.: divide it and the std by 255"
    ):
        Normalize((123.7, 116.3, 103.5), (58.4, 57.1, 57.4))
    for wrong in ("a", None, [[0.5]]):
        with pytest.raises(ConfigError, match="numbers, one for each channel"):
            Normalize(wrong, 1)  # type: ignore[arg-type]
