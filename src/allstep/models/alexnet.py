"""AlexNet in one column (Krizhevsky 2014, https://arxiv.org/abs/1404.5997).

Layers and sizes are those of torchvision's model.

```
image (3, 224, 224)
  11x11 convolution, stride 4 -> norm -> max-pool -> ReLU       64 x 27 x 27
   5x5  convolution           -> norm -> max-pool -> ReLU      192 x 13 x 13
   3x3  convolution           -> norm -> ReLU                  384 x 13 x 13
   3x3  convolution           -> norm -> ReLU                  256 x 13 x 13
   3x3  convolution           -> norm -> max-pool -> ReLU      256 x  6 x  6
  average-pool to 6 x 6, flatten                              9216
  dropout -> linear -> ReLU                                   4096        62 % of all parameters
  dropout -> linear -> ReLU                                   4096        27 %
  linear                                               num_classes
```

Pooling windows are 3x3 with stride 2. Pooling comes before ReLU: the two commute, and ReLU then has
a quarter of the work. At 1,000 classes it has 61,100,840 parameters, 96 % of them in the linear
layers: many bytes to reduce for little computation, which makes it a hard case for data-parallel
training.
"""

import torch
from torch import nn

from allstep.models.norms import Norm, no_norm


class AlexNet(nn.Module):
    """AlexNet: images (n, channels, height, width) in, logits (n, num_classes) out.

    Both sides of an image have at least 63 pixels. `dropout` is the probability before each of the
    two hidden layers. `norm` makes the norm layer for a number of channels (default: none).
    """

    def __init__(
        self,
        num_classes: int = 1000,
        *,
        channels: int = 3,
        dropout: float = 0.5,
        norm: Norm = no_norm,
    ) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *_block(nn.Conv2d(channels, 64, 11, stride=4, padding=2), norm, pool=True),
            *_block(nn.Conv2d(64, 192, 5, padding=2), norm, pool=True),
            *_block(nn.Conv2d(192, 384, 3, padding=1), norm, pool=False),
            *_block(nn.Conv2d(384, 256, 3, padding=1), norm, pool=False),
            *_block(nn.Conv2d(256, 256, 3, padding=1), norm, pool=True),
        )
        self.head = nn.Sequential(
            nn.AdaptiveAvgPool2d(6),
            nn.Flatten(),
            *(nn.Dropout(dropout), nn.Linear(256 * 6 * 6, 4096), nn.ReLU(inplace=True)),
            *(nn.Dropout(dropout), nn.Linear(4096, 4096), nn.ReLU(inplace=True)),
            nn.Linear(4096, num_classes),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.features(images))
        return logits


def _block(convolution: nn.Conv2d, norm: Norm, *, pool: bool) -> list[nn.Module]:
    """Return a convolution with its norm, pooling and ReLU."""
    halve = [nn.MaxPool2d(3, stride=2)] if pool else []
    return [convolution, norm(convolution.out_channels), *halve, nn.ReLU(inplace=True)]
