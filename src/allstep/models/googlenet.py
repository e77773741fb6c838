"""GoogLeNet (Szegedy et al. 2014, https://arxiv.org/abs/1409.4842).

It has a norm after each convolution and no side exits.

```
image (3, 224, 224)
  7x7 convolution, stride 2; pool                       64 x 56 x 56
  1x1 convolution, 3x3 convolution; pool               192 x 28 x 28
  inception 3a, 3b; pool                               480 x 14 x 14
  inception 4a, 4b, 4c, 4d, 4e; pool                   832 x  7 x  7
  inception 5a, 5b                                    1024 x  7 x  7
  mean over the image -> dropout -> linear        num_classes

inception: four parallel branches, whose channels are concatenated
  x --> 1x1 -------------> ones
    --> 1x1 --> 3x3 -----> threes
    --> 1x1 --> 3x3 -----> fives        (5x5 in the paper; 3x3 as in torchvision's model)
    --> 3x3 max-pool -> 1x1 -> pooled
```

A convolution is followed by a norm and ReLU and has no bias. Pools are 3x3 with stride 2, the last
one 2x2, and round up. 6,624,904 parameters at 1,000 classes: few bytes to reduce for much
computation.
"""

from typing import NamedTuple

import torch
from torch import nn

from allstep.models.norms import Norm


class Ways(NamedTuple):
    """Channels of the convolutions of an inception block.

    `ones`, `threes`, `fives` and `pooled` are the output channels of the four branches;
    `before_threes` and `before_fives` those of the 1x1 convolutions before the larger ones.
    """

    ones: int
    before_threes: int
    threes: int
    before_fives: int
    fives: int
    pooled: int

    @property
    def wide(self) -> int:
        """Return the number of output channels of the block."""
        return self.ones + self.threes + self.fives + self.pooled


# Table 1 of the paper.
_STAGES = (
    (Ways(64, 96, 128, 16, 32, 32), Ways(128, 128, 192, 32, 96, 64)),
    (
        Ways(192, 96, 208, 16, 48, 64),
        Ways(160, 112, 224, 24, 64, 64),
        Ways(128, 128, 256, 24, 64, 64),
        Ways(112, 144, 288, 32, 64, 64),
        Ways(256, 160, 320, 32, 128, 128),
    ),
    (Ways(256, 160, 320, 32, 128, 128), Ways(384, 192, 384, 48, 128, 128)),
)


class Inception(nn.Module):
    """Four parallel branches, whose channels are concatenated."""

    def __init__(self, channels: int, ways: Ways, norm: Norm) -> None:
        super().__init__()
        pool = nn.MaxPool2d(3, stride=1, padding=1, ceil_mode=True)
        self.ways = nn.ModuleList(
            [
                _convolution(channels, ways.ones, 1, norm),
                nn.Sequential(
                    _convolution(channels, ways.before_threes, 1, norm),
                    _convolution(ways.before_threes, ways.threes, 3, norm),
                ),
                nn.Sequential(
                    _convolution(channels, ways.before_fives, 1, norm),
                    _convolution(ways.before_fives, ways.fives, 3, norm),
                ),
                nn.Sequential(pool, _convolution(channels, ways.pooled, 1, norm)),
            ]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([way(x) for way in self.ways], 1)


class GoogLeNet(nn.Module):
    """GoogLeNet: images (n, channels, height, width) in, logits (n, num_classes) out.

    Both sides of an image have at least 15 pixels. `dropout` is the probability before the linear
    layer. `norm` makes the norm layer for a number of channels (default: batch norm).
    """

    def __init__(
        self,
        num_classes: int = 1000,
        *,
        channels: int = 3,
        dropout: float = 0.2,
        norm: Norm = nn.BatchNorm2d,
    ) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *(
                _convolution(channels, 64, 7, norm, stride=2),
                nn.MaxPool2d(3, stride=2, ceil_mode=True),
            ),
            *(_convolution(64, 64, 1, norm), _convolution(64, 192, 3, norm)),
        )
        wide = 192
        for stage, pool in zip(_STAGES, (3, 3, 2), strict=True):
            self.features.append(nn.MaxPool2d(pool, stride=2, ceil_mode=True))
            for ways in stage:
                self.features.append(Inception(wide, ways, norm))
                wide = ways.wide
        self.head = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(dropout), nn.Linear(wide, num_classes)
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.features(images))
        return logits


def _convolution(channels: int, wide: int, side: int, norm: Norm, stride: int = 1) -> nn.Sequential:
    """Return a convolution without a bias, with its norm and ReLU."""
    convolution = nn.Conv2d(channels, wide, side, stride=stride, padding=side // 2, bias=False)
    return nn.Sequential(convolution, norm(wide), nn.ReLU(inplace=True))
