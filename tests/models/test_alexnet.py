"""AlexNet against the published model written out plainly, and its sizes."""

import pytest
import torch
from torch import nn

from allstep.models import NORMS, AlexNet


def _published(num_classes: int) -> nn.Sequential:
    """The one-column model, layer after layer, as torchvision's documentation prints it; without
    dropout."""
    return nn.Sequential(
        *(nn.Conv2d(3, 64, 11, 4, 2), nn.ReLU(), nn.MaxPool2d(3, 2)),
        *(nn.Conv2d(64, 192, 5, 1, 2), nn.ReLU(), nn.MaxPool2d(3, 2)),
        *(nn.Conv2d(192, 384, 3, 1, 1), nn.ReLU()),
        *(nn.Conv2d(384, 256, 3, 1, 1), nn.ReLU()),
        *(nn.Conv2d(256, 256, 3, 1, 1), nn.ReLU(), nn.MaxPool2d(3, 2)),
        *(nn.AdaptiveAvgPool2d((6, 6)), nn.Flatten()),
        *(
            nn.Linear(9216, 4096),
            nn.ReLU(),
            nn.Linear(4096, 4096),
            nn.ReLU(),
            nn.Linear(4096, num_classes),
        ),
    )


@pytest.mark.parametrize("side", [224, 63])
def test_it_is_the_published_net(side: int) -> None:
    torch.manual_seed(0)
    model, published = AlexNet(10).eval(), _published(10)
    with torch.no_grad():
        for parameter, theirs in zip(model.parameters(), published.parameters(), strict=True):
            parameter.copy_(theirs)
        images = torch.randn(2, 3, side, side)
        logits = model(images)
        torch.testing.assert_close(logits, published(images))
    assert logits.shape == (2, 10)
    assert logits[0].allclose(logits[1]) is False  # the images reach the output


def test_as_many_parameters_as_the_docstring_says() -> None:
    with torch.device("meta"):
        model = AlexNet()
    assert sum(parameter.numel() for parameter in model.parameters()) == 61_100_840
    linear = [
        layer.weight.numel() + layer.bias.numel()
        for layer in model.modules()
        if isinstance(layer, nn.Linear)
    ]
    assert [round(100 * numel / 61_100_840) for numel in (*linear[:2], sum(linear))] == [62, 27, 96]


def test_dropout_and_norm_are_what_was_asked_for() -> None:
    with torch.device("meta"):
        model = AlexNet(dropout=0.1, norm=NORMS["group"])
    assert [layer.p for layer in model.modules() if isinstance(layer, nn.Dropout)] == [0.1, 0.1]
    norms = [layer.num_channels for layer in model.modules() if isinstance(layer, nn.GroupNorm)]
    assert norms == [64, 192, 384, 256, 256]


def test_every_parameter_learns() -> None:
    model = AlexNet(7, dropout=0.0)
    model(torch.randn(2, 3, 63, 63)).sum().backward()
    assert all(
        parameter.grad is not None and parameter.grad.any() for parameter in model.parameters()
    )
