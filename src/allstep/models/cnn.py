"""A small convolutional model for small images.

```
image (channels, height, width)
  3x3 convolution -> norm -> max-pool 2x2 -> ReLU     once per entry of `widths`
  flatten -> linear to `hidden` -> ReLU -> linear to `num_classes`
```

Images with a side of less than 2 pixels are not pooled. Pooling comes before ReLU: the two
commute, and ReLU then has a quarter of the work. With widths 16,
32, 64 it has 98,442 parameters on 28x28 images.
"""

from collections.abc import Sequence

import torch
from torch import nn

from allstep.models.norms import Norm, no_norm


class SmallCnn(nn.Module):
    """A small CNN: images (n, channels, height, width) in, logits (n, num_classes) out.

    `shape` is (channels, height, width) of the images. `widths` are the channels of the
    convolutions, one convolution per entry; `hidden` is the number of units of the hidden linear
    layer. `norm` makes the norm layer for a number of channels (default: none).
    """

    def __init__(
        self,
        num_classes: int,
        shape: tuple[int, int, int],
        *,
        widths: Sequence[int] = (16, 32, 64),
        hidden: int = 128,
        norm: Norm = no_norm,
    ) -> None:
        super().__init__()
        channels, height, width = shape
        blocks: list[nn.Module] = []
        for wide in widths:
            pool = min(height, width) >= 2
            blocks.append(_block(channels, wide, norm, pool))
            channels = wide
            if pool:
                height, width = height // 2, width // 2
        self.features = nn.Sequential(*blocks)
        self.head = nn.Sequential(
            nn.Flatten(),
            nn.Linear(channels * height * width, hidden),
            nn.ReLU(),
            nn.Linear(hidden, num_classes),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.features(images))
        return logits


def _block(channels: int, wide: int, norm: Norm, pool: bool) -> nn.Sequential:
    """Return a convolution with its norm, pooling and ReLU."""
    halve = nn.MaxPool2d(2) if pool else nn.Identity()
    return nn.Sequential(nn.Conv2d(channels, wide, 3, padding=1), norm(wide), halve, nn.ReLU())
