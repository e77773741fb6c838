"""A model like LeNet-5, with today's activations and pooling.

LeNet-5: LeCun et al. 1998, http://yann.lecun.com/exdb/publis/pdf/lecun-98.pdf

```
image (1, 28, 28)
  5x5 convolution -> norm -> max-pool 2x2 -> ReLU      32 x 14 x 14    (LeNet-5: 6)
  5x5 convolution -> norm -> max-pool 2x2 -> ReLU      64 x  7 x  7    (LeNet-5: 16)
  flatten -> linear -> ReLU -> dropout                256              (LeNet-5: 120 and 84)
  linear                                      num_classes
```

Wider than the original and trained in the same time today. At 28x28 and 10 classes it has 857,738
parameters, most of them in the first linear layer.
"""

import torch
from torch import nn

from allstep.models.norms import Norm, no_norm


class LeNet(nn.Module):
    """LeNet: images (n, channels, height, width) in, logits (n, num_classes) out.

    `shape` is (channels, height, width) of the images; both sides have at least 4 pixels. `widths`
    are the channels of the two convolutions, `hidden` is the number of units of the hidden linear
    layer, `dropout` the probability after it. `norm` makes the norm layer for a number of channels
    (default: none).
    """

    def __init__(
        self,
        num_classes: int = 10,
        shape: tuple[int, int, int] = (1, 28, 28),
        *,
        widths: tuple[int, int] = (32, 64),
        hidden: int = 256,
        dropout: float = 0.0,
        norm: Norm = no_norm,
    ) -> None:
        super().__init__()
        channels, height, width = shape
        first, second = widths
        self.features = nn.Sequential(*_block(channels, first, norm), *_block(first, second, norm))
        num_features = second * (height // 4) * (width // 4)
        self.head = nn.Sequential(
            *(nn.Flatten(), nn.Linear(num_features, hidden), nn.ReLU(inplace=True)),
            *(nn.Dropout(dropout), nn.Linear(hidden, num_classes)),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.features(images))
        return logits


def _block(channels: int, wide: int, norm: Norm) -> list[nn.Module]:
    """Return a convolution with its norm, pooling and ReLU."""
    return [
        nn.Conv2d(channels, wide, 5, padding=2),
        norm(wide),
        nn.MaxPool2d(2),
        nn.ReLU(inplace=True),
    ]
