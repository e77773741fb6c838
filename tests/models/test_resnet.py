"""The ResNets against the published sizes and costs, and their blocks against the formulas written
out plainly."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import batch_norm, conv2d, relu
from torch.utils.flop_counter import FlopCounterMode

from allstep.errors import ConfigError
from allstep.models import NORMS, ResNet, resnet18, resnet34, resnet50, resnet101
from allstep.models.norms import no_norm
from allstep.models.resnet import Basic, Block, Bottleneck

# parameters at 1,000 classes, and billions of multiplications for an image of 224 x 224
# (torchvision's tables)
PUBLISHED = [
    (resnet18, 11_689_512, 1.81),
    (resnet34, 21_797_672, 3.66),
    (resnet50, 25_557_032, 4.09),
    (resnet101, 44_549_160, 7.80),
]


def _count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _multiplications(model: nn.Module, side: int) -> int:
    with FlopCounterMode(display=False) as counter:
        model(torch.empty(1, 3, side, side, device="meta"))
    return int(counter.get_total_flops()) // 2


@pytest.mark.parametrize(("make", "parameters", "billions"), PUBLISHED)
def test_sizes_and_costs_are_the_published_ones(
    make: Callable[..., ResNet], parameters: int, billions: float
) -> None:
    with torch.device("meta"):
        model = make()
    assert _count(model) == parameters
    # The cost fixes where the strides are: in the 1x1 convolutions of a bottleneck they would make
    # ResNet-50 cost 3.8.
    assert round(_multiplications(model, 224) / 1e9, 2) == billions


def test_the_form_for_small_images() -> None:
    with torch.device("meta"):
        model = resnet18(10, small_pictures=True)
        assert model.stages(model.stem(torch.empty(1, 3, 32, 32))).shape == (1, 512, 4, 4)
    assert _count(model) == 11_173_962
    stem, first = 9 * 3 * 64 * 32**2, 4 * 9 * 64 * 64 * 32**2
    later = (9 * 64 + 3 * 9 * 128 + 64) * 128 * 16**2  # of each: half the side, twice the channels
    assert _multiplications(model, 32) == stem + first + 3 * later + 512 * 10


def _basic(x: Tensor, p: list[Tensor], stride: int) -> Tensor:
    """The paper's figure 5, left; the parameters in the order of the model."""
    y = relu(_norm(conv2d(x, p[0], stride=stride, padding=1), p[1], p[2]))
    y = _norm(conv2d(y, p[3], padding=1), p[4], p[5])
    return relu(y + (_norm(conv2d(x, p[6], stride=stride), p[7], p[8]) if len(p) > 6 else x))


def _bottleneck(x: Tensor, p: list[Tensor], stride: int) -> Tensor:
    """The same figure, right."""
    y = relu(_norm(conv2d(x, p[0]), p[1], p[2]))
    y = relu(_norm(conv2d(y, p[3], stride=stride, padding=1), p[4], p[5]))
    y = _norm(conv2d(y, p[6]), p[7], p[8])
    return relu(y + (_norm(conv2d(x, p[9], stride=stride), p[10], p[11]) if len(p) > 9 else x))


def _norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return batch_norm(x, None, None, weight, bias, training=True)


@pytest.mark.parametrize(("block", "formula"), [(Basic, _basic), (Bottleneck, _bottleneck)])
@pytest.mark.parametrize(("channels", "stride"), [(16, 1), (16, 2), (8, 1)])
def test_blocks_compute_the_papers_formulas(
    block: type[Basic] | type[Bottleneck],
    formula: Callable[..., Tensor],
    channels: int,
    stride: int,
) -> None:
    torch.manual_seed(0)
    model = block(channels, 16 // block.expansion, stride, nn.BatchNorm2d)
    assert isinstance(model.past, nn.Identity) == (channels == 16 and stride == 1)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(3, channels, 9, 9)
    before = x.clone()
    torch.testing.assert_close(model(x), formula(x, list(model.parameters()), stride))
    assert torch.equal(x, before)  # no ReLU in place on what the way past still needs


@pytest.mark.parametrize("block", [Basic, Bottleneck])
def test_with_a_zero_last_norm_a_block_starts_by_passing_its_input_on(
    block: type[Basic] | type[Bottleneck],
) -> None:
    model = ResNet(block, (2, 1, 1, 1), 10, zero_last_norm=True, small_pictures=True)
    x = torch.rand(2, 64 * block.expansion, 8, 8)
    assert torch.equal(model.stages[0][1](x), x)
    zero = [
        norm
        for each in model.modules()
        if isinstance(each, Block)
        for norm in each.modules()
        if isinstance(norm, nn.BatchNorm2d) and not norm.weight.any()
    ]
    assert len(zero) == 5  # one of each block, and none of the ways past
    model = ResNet(block, (2, 1, 1, 1), 10, small_pictures=True)
    assert not torch.equal(model.stages[0][1](x), x)


def test_a_norm_without_weight_cannot_start_at_zero() -> None:
    with pytest.raises(ConfigError, match="Identity has no weight"):
        resnet18(10, norm=no_norm, zero_last_norm=True)


@pytest.mark.parametrize("norm", [nn.BatchNorm2d, NORMS["group"], no_norm])
def test_every_parameter_learns(norm: Callable[[int], nn.Module]) -> None:
    torch.manual_seed(0)
    model = ResNet(Bottleneck, (1, 1, 1, 1), 7, norm=norm)
    logits = model(torch.randn(2, 3, 64, 64))
    assert logits.shape == (2, 7)
    logits[:, 0].sum().backward()
    assert all(
        parameter.grad is not None and parameter.grad.any()
        for parameter in model.stages.parameters()
    )
    kinds = {
        type(layer) for layer in model.modules() if isinstance(layer, nn.BatchNorm2d | nn.GroupNorm)
    }
    assert kinds == {type(norm(8))} - {nn.Identity}
