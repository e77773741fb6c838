"""The small CNN: sizes, and that its norm is what was asked for."""

import pytest
import torch
from torch import nn

from allstep.models import NORMS, SmallCnn


@pytest.mark.parametrize("shape", [(1, 28, 28), (1, 8, 8), (3, 32, 32), (1, 1, 1), (2, 5, 3)])
@pytest.mark.parametrize("norm", sorted(NORMS))
def test_any_size_of_image(shape: tuple[int, int, int], norm: str) -> None:
    model = SmallCnn(7, shape, norm=NORMS[norm])
    logits = model(torch.randn(4, *shape))
    assert logits.shape == (4, 7)
    logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_as_many_parameters_as_the_docstring_says() -> None:
    assert sum(parameter.numel() for parameter in SmallCnn(10, (1, 28, 28)).parameters()) == 98_442


def test_the_norm_is_a_factory() -> None:
    model = SmallCnn(10, (1, 28, 28), widths=(4, 6), norm=nn.BatchNorm2d)
    assert [
        layer.num_features for layer in model.modules() if isinstance(layer, nn.BatchNorm2d)
    ] == [
        4,
        6,
    ]
    groups = [
        layer.num_groups
        for layer in SmallCnn(10, (1, 8, 8), widths=(12,), norm=NORMS["group"]).modules()
        if isinstance(layer, nn.GroupNorm)
    ]
    assert groups == [4]


@pytest.mark.parametrize("norm", sorted(NORMS))
def test_samples_do_not_see_each_other(norm: str) -> None:
    """So that N workers compute what one would."""
    torch.manual_seed(0)
    model, images = SmallCnn(10, (1, 8, 8), norm=NORMS[norm]), torch.randn(6, 1, 8, 8)
    alone = torch.cat([model(image[None]) for image in images])
    torch.testing.assert_close(model(images), alone)
