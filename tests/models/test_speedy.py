"""The fast CIFAR model: what its first layer is for, and how its convolutions start."""

import torch
from torch import nn

from allstep.models import Speedy


def correlated_images(n: int) -> torch.Tensor:
    """Neighbours alike, as in photographs."""
    noise = torch.randn(n, 3, 40, 40)
    return nn.functional.avg_pool2d(noise, 5, stride=1)[:, :, :32, :32] * 5 + 0.1 * torch.randn(
        n, 3, 32, 32
    )


def test_whitening_makes_patches_uncorrelated() -> None:
    torch.manual_seed(0)
    model, images = Speedy(), correlated_images(200)
    model.whiten(images, floor=0.0)
    responses = nn.functional.conv2d(images, model.whitening.weight)
    half = responses.shape[1] // 2
    flat = responses[:, :half].transpose(0, 1).flatten(1).double()
    torch.testing.assert_close(
        flat @ flat.T / flat.shape[1], torch.eye(half, dtype=torch.double), atol=2e-3, rtol=0
    )
    torch.testing.assert_close(responses[:, half:], -responses[:, :half])


def test_the_whitening_is_not_trained_but_its_bias_is() -> None:
    model = Speedy()
    assert not model.whitening.weight.requires_grad
    assert model.whitening.bias is not None and model.whitening.bias.requires_grad


def test_convolutions_start_by_passing_channels_on() -> None:
    torch.manual_seed(0)
    convolution = next(layer for layer in Speedy().groups.modules() if isinstance(layer, nn.Conv2d))
    x = torch.randn(1, convolution.in_channels, 5, 5)
    torch.testing.assert_close(convolution(x)[:, : convolution.in_channels], x)
