"""Residual models for small images: their blocks against the papers' formulas, and depths that do
not exist."""

import pytest
import torch
from torch import nn
from torch.nn.functional import batch_norm, conv2d, relu

from allstep.errors import ConfigError
from allstep.models import CifarResNet, WideResNet
from allstep.models.norms import no_norm
from allstep.models.wide_resnet import _Plain, _Wide


def _norm(x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
    assert isinstance(layer, nn.BatchNorm2d)
    return batch_norm(x, None, None, layer.weight, layer.bias, training=True)


def test_a_block_of_the_original_nets() -> None:
    torch.manual_seed(0)
    block, x = _Plain(4, 8, 2, nn.BatchNorm2d), torch.randn(3, 4, 6, 6)
    first, norm1, _, second, norm2 = block.through
    y = _norm(
        conv2d(
            relu(_norm(conv2d(x, first.weight, stride=2, padding=1), norm1)),
            second.weight,
            padding=1,
        ),
        norm2,
    )
    past = torch.zeros(3, 8, 3, 3)
    past[:, 2:6] = x[:, :, ::2, ::2]
    torch.testing.assert_close(block(x), relu(y + past))


@pytest.mark.parametrize(("channels", "stride"), [(4, 2), (4, 1), (8, 1)])
def test_a_wide_block(channels: int, stride: int) -> None:
    torch.manual_seed(0)
    block, x = _Wide(channels, 8, stride, nn.BatchNorm2d, 0.0), torch.randn(3, channels, 6, 6)
    entered = relu(_norm(x, block.enter[0]))
    first, norm, _, _, second = block.through
    y = conv2d(
        relu(_norm(conv2d(entered, first.weight, stride=stride, padding=1), norm)),
        second.weight,
        padding=1,
    )
    past = (
        conv2d(entered, block.past.weight, stride=stride)
        if isinstance(block.past, nn.Conv2d)
        else x
    )
    assert isinstance(block.past, nn.Conv2d) == (channels != 8 or stride != 1)
    torch.testing.assert_close(block(x), y + past)


def test_without_skip_the_blocks_are_the_same_layers_in_a_row() -> None:
    torch.manual_seed(0)
    block = _Plain(4, 8, 2, nn.BatchNorm2d, skip=False)
    x = torch.randn(3, 4, 6, 6)
    torch.testing.assert_close(block(x), relu(block.through(x)), rtol=0, atol=0)
    torch.manual_seed(0)
    ours = CifarResNet(20, skip=False)
    torch.manual_seed(0)
    theirs = CifarResNet(20).state_dict()
    assert ours.state_dict().keys() == theirs.keys()
    assert all(torch.equal(each, theirs[name]) for name, each in ours.state_dict().items())
    with pytest.raises(ConfigError, match=r"passes nothing on; choose one of the two"):
        CifarResNet(20, zero_last_norm=True, skip=False)


def test_zero_last_norm() -> None:
    torch.manual_seed(0)
    model = CifarResNet(8, zero_last_norm=True)
    x = torch.randn(2, 16, 8, 8)
    assert torch.equal(model.stages[0](x), relu(x))
    with pytest.raises(ConfigError, match="no weight that could start at zero"):
        CifarResNet(8, norm=no_norm, zero_last_norm=True)


@pytest.mark.parametrize(("make", "rest"), [(CifarResNet, 2), (WideResNet, 4)])
@pytest.mark.parametrize("depth", [0, 4, 21, 27])
def test_depths_that_do_not_exist(
    make: type[CifarResNet] | type[WideResNet], rest: int, depth: int
) -> None:
    if depth == 4 and rest == 4:
        depth = 9
    with pytest.raises(
        ConfigError, match=rf"depth {depth}: .*6n\+{rest} layers, such as {6 + rest},"
    ):
        make(depth)
