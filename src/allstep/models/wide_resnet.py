"""Residual models for images of 32x32: ResNet-20 to 110 and WideResNet.

He et al. 2015, https://arxiv.org/abs/1512.03385, section 4.2, and Zagoruyko and Komodakis 2016,
https://arxiv.org/abs/1605.07146.

```
                                         CifarResNet(depth)   WideResNet(depth, widen)
                                         depth = 6n+2         depth = 6n+4
  3x3 convolution              32 x 32   16 channels          16 channels
  n blocks                     32 x 32   16                   16 x widen
  n blocks, the first halves   16 x 16   32                   32 x widen
  n blocks, the first halves    8 x  8   64                   64 x widen
  mean -> linear                         num_classes          (norm -> ReLU before the mean)

block of CifarResNet                       block of WideResNet, norms first
  x -------------------.                     x -> norm -> ReLU ---------------.
  3x3 -> norm -> ReLU  | zeros for           3x3 -> norm -> ReLU -> dropout   | 1x1 where size or
  3x3 -> norm          | new channels        3x3                              | channels change,
  + <------------------'                     + <------------------------------' otherwise x itself
  ReLU
```

Where CifarResNet changes size, the shortcut of a block is every second pixel, with zeros for the
new channels: it has no parameters. With `skip=False` it has no shortcuts: the same layers and
weights one after the other, to see what the shortcuts do (docs/landscape.md). Parameters at 10
classes: ResNet-20 269,722, ResNet-56 853,018, WRN-16-4 2,748,890, WRN-28-10 36,479,194.
"""

import torch
from torch import nn
from torch.nn import functional

from allstep.errors import ConfigError
from allstep.models.norms import Norm
from allstep.models.resnet import start_at_zero

_WIDTHS = (16, 32, 64)


class _Past(nn.Module):
    """A shortcut without parameters: every `stride`-th pixel, and zeros for the new channels."""

    def __init__(self, new_channels: int, stride: int) -> None:
        super().__init__()
        self.new_channels, self.stride = new_channels, stride

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fewer = x[:, :, :: self.stride, :: self.stride]
        return functional.pad(
            fewer, (0, 0, 0, 0, self.new_channels // 2, self.new_channels - self.new_channels // 2)
        )


class _Plain(nn.Module):
    """A block of CifarResNet; without `skip` it has no shortcut."""

    def __init__(
        self, channels: int, wide: int, stride: int, norm: Norm, skip: bool = True
    ) -> None:
        super().__init__()
        self.through = nn.Sequential(
            *(_convolution(channels, wide, stride), norm(wide), nn.ReLU(inplace=True)),
            *(_convolution(wide, wide), norm(wide)),
        )
        self.past = _Past(wide - channels, stride) if skip else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.through(x)
        return functional.relu(y if self.past is None else y + self.past(x))


class _Wide(nn.Module):
    """A block of WideResNet, in which a norm precedes each convolution."""

    def __init__(self, channels: int, wide: int, stride: int, norm: Norm, dropout: float) -> None:
        super().__init__()
        self.enter = nn.Sequential(norm(channels), nn.ReLU(inplace=True))
        self.through = nn.Sequential(
            *(_convolution(channels, wide, stride), norm(wide), nn.ReLU(inplace=True)),
            *(nn.Dropout(dropout), _convolution(wide, wide)),
        )
        self.changes = stride != 1 or channels != wide
        self.past: nn.Module = nn.Identity()
        if self.changes:
            self.past = nn.Conv2d(channels, wide, 1, stride=stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        entered = self.enter(x)
        out: torch.Tensor = self.through(entered) + self.past(entered if self.changes else x)
        return out


class _SmallImages(nn.Module):
    """Stem, stages and head of a model; `leave` is applied between the stages and the head."""

    def __init__(
        self, stem: nn.Module, stages: nn.Module, leave: nn.Module, wide: int, num_classes: int
    ) -> None:
        super().__init__()
        self.stem, self.stages, self.leave = stem, stages, leave
        self.head = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(wide, num_classes)
        )
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.leave(self.stages(self.stem(images))))
        return logits


class CifarResNet(_SmallImages):
    """A ResNet for small images: (n, channels, height, width) in, logits (n, num_classes) out.

    `depth` is the number of layers: 20, 32, 44, 56, 110, or any other 6n+2. `norm` makes the norm
    layer for a number of channels (default: batch norm). `zero_last_norm` initializes the scale of
    the last norm of each block to zero (default: False). `skip` adds the shortcut around each block
    (default: True).
    """

    def __init__(
        self,
        depth: int = 20,
        num_classes: int = 10,
        *,
        channels: int = 3,
        norm: Norm = nn.BatchNorm2d,
        zero_last_norm: bool = False,
        skip: bool = True,
    ) -> None:
        if zero_last_norm and not skip:
            raise ConfigError(
                "zero_last_norm: a block without a shortcut (skip=False) that starts at zero passes"
                " nothing on; choose one of the two"
            )
        blocks, stages, before = _blocks(depth, 2), nn.Sequential(), 16
        for wide in _WIDTHS:
            for place in range(blocks):
                stride = 2 if wide != before and not place else 1
                stages.append(_Plain(before, wide, stride, norm, skip))
                before = wide
        stem = nn.Sequential(_convolution(channels, 16), norm(16), nn.ReLU(inplace=True))
        super().__init__(stem, stages, nn.Identity(), before, num_classes)
        if zero_last_norm:
            for block in stages:
                assert isinstance(block, _Plain)
                start_at_zero(block.through[-1])


class WideResNet(_SmallImages):
    """A wide ResNet: images (n, channels, height, width) in, logits (n, num_classes) out.

    `depth` is the number of layers, 6n+4. `widen` is the factor of the channels of the stages: 16,
    32 and 64 times `widen`. `dropout` is the probability between the two convolutions of a block.
    `norm` makes the norm layer for a number of channels (default: batch norm). WRN-28-10 is
    `WideResNet(28, 10)`.
    """

    def __init__(
        self,
        depth: int = 28,
        widen: int = 10,
        num_classes: int = 10,
        *,
        channels: int = 3,
        dropout: float = 0.0,
        norm: Norm = nn.BatchNorm2d,
    ) -> None:
        blocks, stages, before = _blocks(depth, 4), nn.Sequential(), 16
        for number, narrow in enumerate(_WIDTHS):
            for place in range(blocks):
                stages.append(
                    _Wide(before, narrow * widen, 2 if number and not place else 1, norm, dropout)
                )
                before = narrow * widen
        leave = nn.Sequential(norm(before), nn.ReLU(inplace=True))
        super().__init__(_convolution(channels, 16), stages, leave, before, num_classes)


def _blocks(depth: int, rest: int) -> int:
    """Return the number of blocks of a stage, (depth - rest) / 6; ConfigError if not whole."""
    if depth < 6 + rest or (depth - rest) % 6:
        raise ConfigError(
            f"depth {depth}: this model has 6n+{rest} layers, such as {6 + rest}, {12 + rest},"
            f" {18 + rest}, {24 + rest}"
        )
    return (depth - rest) // 6


def _convolution(channels: int, wide: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(channels, wide, 3, stride=stride, padding=1, bias=False)
