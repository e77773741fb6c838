"""The models' sizes and costs against the published ones, and that every norm and every parameter is
used."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from allstep.models import NORMS, CifarResNet, GoogLeNet, LeNet, Speedy, Vgg16, WideResNet

Net = Callable[..., nn.Module]

PUBLISHED: list[tuple[str, Net, tuple[int, int], int, float]] = [
    # name, model, (channels, side), parameters, millions of multiplications for one image
    (
        "LeNet",
        LeNet,
        (1, 28),
        857_738,
        11.5,
    ),  # by hand: 28^2 25 32 + 14^2 25 32 64 + 3136 256 + 2560
    ("VGG-16", Vgg16, (3, 224), 138_357_544, 15_470.3),  # torchvision: 138357544, 15.47 G
    ("GoogLeNet", GoogLeNet, (3, 224), 6_624_904, 1_498.4),  # torchvision: 6624904, 1.50 G
    (
        "ResNet-20",
        lambda **k: CifarResNet(20, **k),
        (3, 32),
        269_722,
        40.6,
    ),  # He et al., table 6: 0.27 M
    ("ResNet-56", lambda **k: CifarResNet(56, **k), (3, 32), 853_018, 125.5),  # the same: 0.85 M
    (
        "WRN-16-4",
        lambda **k: WideResNet(16, 4, **k),
        (3, 32),
        2_748_890,
        392.6,
    ),  # Zagoruyko and Komodakis: 2.7 M
    (
        "WRN-28-10",
        lambda **k: WideResNet(28, 10, **k),
        (3, 32),
        36_479_194,
        5_243.3,
    ),  # the same: 36.5 M, 5.2 G
    (
        "Speedy",
        Speedy,
        (3, 32),
        1_972_792,
        118.1,
    ),  # Jordan's model has 1.97 M; 31^2 (288 + 13824) + 15^2 (36864 + ...) by hand
]


@pytest.mark.parametrize(
    ("make", "image", "parameters", "millions"),
    [row[1:] for row in PUBLISHED],
    ids=[row[0] for row in PUBLISHED],
)
def test_sizes_and_costs(
    make: Net, image: tuple[int, int], parameters: int, millions: float
) -> None:
    channels, side = image
    with torch.device("meta"):
        model = make().eval()
    with FlopCounterMode(display=False) as counter:
        model(torch.empty(1, channels, side, side, device="meta"))
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert round(counter.get_total_flops() / 2e6, 1) == millions


SMALL: list[tuple[Net, tuple[int, int, int]]] = [
    (lambda **k: LeNet(7, (2, 9, 13), **k), (2, 9, 13)),
    (lambda **k: Vgg16(7, hidden=16, **k), (3, 32, 32)),
    (lambda **k: GoogLeNet(7, **k), (3, 15, 18)),
    (lambda **k: CifarResNet(8, 7, **k), (3, 8, 12)),
    (lambda **k: WideResNet(10, 1, 7, **k), (3, 8, 12)),
    (lambda **k: Speedy(7, widths=(24, 32, 40), **k), (3, 25, 30)),
]


@pytest.mark.parametrize(("make", "shape"), SMALL)
@pytest.mark.parametrize("norm", [NORMS["group"], nn.BatchNorm2d], ids=["group", "batch"])
def test_they_learn_with_any_norm(
    make: Net, shape: tuple[int, int, int], norm: Callable[[int], nn.Module]
) -> None:
    torch.manual_seed(0)
    made: list[nn.Module] = []

    def remembered(channels: int) -> nn.Module:
        made.append(norm(channels))
        return made[-1]

    model = make(norm=remembered)
    logits = model(torch.randn(2, *shape))
    logits.square().sum().backward()
    assert logits.shape == (2, 7)
    inside = {id(layer) for layer in model.modules()}
    assert made and all(id(layer) in inside for layer in made)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert all(
        parameter.grad is not None and parameter.grad.isfinite().all() for parameter in trained
    )
