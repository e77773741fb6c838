"""ResNet-18, 34, 50 and 101, for large and for small images.

He et al. 2015, https://arxiv.org/abs/1512.03385.

```
image (3, 224, 224)                          small_pictures=True: (3, 32, 32)  channels
  7x7 convolution, stride 2 -> norm -> ReLU    3x3 convolution -> norm -> ReLU  64
  3x3 max-pool, stride 2                       (no pooling)                     64
  stage 1                          56 x 56     32 x 32                          64 x expansion
  stage 2, its first block halves  28 x 28     16 x 16                         128 x expansion
  stage 3, its first block halves  14 x 14      8 x  8                         256 x expansion
  stage 4, its first block halves   7 x  7      4 x  4                         512 x expansion
  mean over the image -> linear                                                num_classes

basic block (expansion 1)            bottleneck (expansion 4)
  x ------------.                      x ------------.
  3x3 -> norm   |                      1x1 -> norm   |
  ReLU          |                      ReLU          |
  3x3 -> norm   |                      3x3 -> norm   |      (has the stride, as in torchvision)
  + <-----------'                      ReLU          |
  ReLU                                 1x1 -> norm   |
                                       + <-----------'
                                       ReLU
```

The shortcut of a block is the identity; where size or channels change, it is a 1x1 convolution and
a norm. Convolutions have no bias: the norm after each has one.

`zero_last_norm=True` initializes the scale of the last norm of each block to zero, so that each
block starts as the identity; large batches need this (Goyal et al. 2017,
https://arxiv.org/abs/1706.02677). At 1,000 classes:

=============  ==============================  ============  =====
resnet18       basic, 2 + 2 + 2 + 2 blocks       11,689,512  parameters
resnet34       basic, 3 + 4 + 6 + 3              21,797,672
resnet50       bottleneck, 3 + 4 + 6 + 3         25,557,032
resnet101      bottleneck, 3 + 4 + 23 + 3        44,549,160
=============  ==============================  ============  =====
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from allstep.errors import ConfigError
from allstep.models.norms import Norm

_WIDTHS = (64, 128, 256, 512)


class Block(nn.Module):
    """A residual block: ReLU(past(x) + through(x)), where `past` is the shortcut.

    `through` ends with a norm; the block has `wide_out` output channels.
    """

    expansion: int

    def __init__(
        self, channels: int, through: nn.Sequential, wide_out: int, stride: int, norm: Norm
    ) -> None:
        super().__init__()
        self.through = through
        self.past: nn.Module = nn.Identity()
        if stride != 1 or channels != wide_out:
            self.past = nn.Sequential(_convolution(channels, wide_out, 1, stride), norm(wide_out))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.relu(self.through(x) + self.past(x))
        return out


class Basic(Block):
    """A residual block of two 3x3 convolutions."""

    expansion = 1

    def __init__(self, channels: int, wide: int, stride: int, norm: Norm) -> None:
        through = nn.Sequential(
            *(_convolution(channels, wide, 3, stride), norm(wide), nn.ReLU(inplace=True)),
            *(_convolution(wide, wide, 3), norm(wide)),
        )
        super().__init__(channels, through, wide, stride, norm)


class Bottleneck(Block):
    """A residual block of a 3x3 convolution on a quarter of the channels, between two 1x1 ones."""

    expansion = 4

    def __init__(self, channels: int, wide: int, stride: int, norm: Norm) -> None:
        wide_out = wide * self.expansion
        through = nn.Sequential(
            *(_convolution(channels, wide, 1), norm(wide), nn.ReLU(inplace=True)),
            *(_convolution(wide, wide, 3, stride), norm(wide), nn.ReLU(inplace=True)),
            *(_convolution(wide, wide_out, 1), norm(wide_out)),
        )
        super().__init__(channels, through, wide_out, stride, norm)


class ResNet(nn.Module):
    """A ResNet: images (n, channels, height, width) in, logits (n, num_classes) out.

    `block` is the class of its blocks, `Basic` or `Bottleneck`; `depths` is the number of blocks of
    each of the four stages. `norm` makes the norm layer for a number of channels (default: batch
    norm). `zero_last_norm` initializes the scale of the last norm of each block to zero.
    `small_pictures` replaces the 7x7 convolution with stride 2 by a 3x3 one with stride 1 and omits
    the first max-pooling, for images of about 32x32 pixels. Both are False by default.
    """

    def __init__(
        self,
        block: type[Basic] | type[Bottleneck],
        depths: Sequence[int],
        num_classes: int = 1000,
        *,
        channels: int = 3,
        norm: Norm = nn.BatchNorm2d,
        zero_last_norm: bool = False,
        small_pictures: bool = False,
    ) -> None:
        super().__init__()
        enter = (
            _convolution(channels, 64, 3) if small_pictures else _convolution(channels, 64, 7, 2)
        )
        halve = nn.Identity() if small_pictures else nn.MaxPool2d(3, stride=2, padding=1)
        self.stem = nn.Sequential(enter, norm(64), nn.ReLU(inplace=True), halve)
        self.stages, channels = nn.Sequential(), 64
        for number, (wide, depth) in enumerate(zip(_WIDTHS, depths, strict=True)):
            stage = nn.Sequential()
            for place in range(depth):
                stage.append(block(channels, wide, 2 if number and not place else 1, norm))
                channels = wide * block.expansion
            self.stages.append(stage)
        self.head = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes)
        )
        self._initialise(zero_last_norm)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.stages(self.stem(images)))
        return logits

    def _initialise(self, zero_last_norm: bool) -> None:
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
            elif zero_last_norm and isinstance(layer, Block):
                start_at_zero(layer.through[-1])


def _convolution(channels: int, wide: int, side: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(channels, wide, side, stride=stride, padding=side // 2, bias=False)


def start_at_zero(norm: nn.Module) -> None:
    """Set the scale of a norm to zero; raise ConfigError if it has none or does not train it."""
    weight = getattr(norm, "weight", None)
    if weight is None:
        raise ConfigError(
            f"zero_last_norm: {type(norm).__name__} has no weight that could start at zero; choose"
            " a norm that has one, or zero_last_norm=False"
        )
    if not weight.requires_grad:
        raise ConfigError(
            "zero_last_norm: a norm without a scale that learns would stay at zero; choose one of"
            " the two"
        )
    nn.init.zeros_(weight)


resnet18 = partial(ResNet, Basic, (2, 2, 2, 2))
resnet34 = partial(ResNet, Basic, (3, 4, 6, 3))
resnet50 = partial(ResNet, Bottleneck, (3, 4, 6, 3))
resnet101 = partial(ResNet, Bottleneck, (3, 4, 23, 3))
