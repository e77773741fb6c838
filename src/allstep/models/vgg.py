"""VGG-16 (Simonyan and Zisserman 2014, https://arxiv.org/abs/1409.1556), configuration D.

```
image (3, 224, 224)
  2 x (3x3 convolution -> norm -> ReLU), halve        64 x 112 x 112
  2 x                                                128 x  56 x  56
  3 x                                                256 x  28 x  28
  3 x                                                512 x  14 x  14
  3 x                                                512 x   7 x   7
  average-pool to 7 x 7, flatten                   25088
  linear -> ReLU -> dropout                         4096      74 % of all parameters
  linear -> ReLU -> dropout                         4096      12 %
  linear                                     num_classes
```

138,357,544 parameters at 1,000 classes: few, large tensors, the hardest of the classic models to
reduce over workers.
"""

import torch
from torch import nn

from allstep.models.norms import Norm, no_norm

_STAGES = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))
"""Channels and number of convolutions of each stage."""


class Vgg16(nn.Module):
    """VGG-16: images (n, channels, height, width) in, logits (n, num_classes) out.

    Both sides of an image have at least 32 pixels. `hidden` is the number of units of each of the
    two hidden linear layers, `dropout` the probability after each. `norm` makes the norm layer for
    a number of channels (default: none).
    """

    def __init__(
        self,
        num_classes: int = 1000,
        *,
        channels: int = 3,
        hidden: int = 4096,
        dropout: float = 0.5,
        norm: Norm = no_norm,
    ) -> None:
        super().__init__()
        self.features = nn.Sequential()
        for wide, depth in _STAGES:
            for _ in range(depth):
                self.features.extend(
                    [nn.Conv2d(channels, wide, 3, padding=1), norm(wide), nn.ReLU(inplace=True)]
                )
                channels = wide
            self.features.append(nn.MaxPool2d(2))
        self.head = nn.Sequential(
            *(nn.AdaptiveAvgPool2d(7), nn.Flatten()),
            *(nn.Linear(512 * 7 * 7, hidden), nn.ReLU(inplace=True), nn.Dropout(dropout)),
            *(nn.Linear(hidden, hidden), nn.ReLU(inplace=True), nn.Dropout(dropout)),
            nn.Linear(hidden, num_classes),
        )
        for layer in self.modules():
            _initialise(layer)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.features(images))
        return logits


def _initialise(layer: nn.Module) -> None:
    """Initialize a layer so that activations keep their scale over 13 convolutions without a norm.

    He et al. 2015, https://arxiv.org/abs/1502.01852.
    """
    if isinstance(layer, nn.Conv2d):
        nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    elif isinstance(layer, nn.Linear):
        nn.init.normal_(layer.weight, 0, 0.01)
    if isinstance(layer, nn.Conv2d | nn.Linear) and layer.bias is not None:
        nn.init.zeros_(layer.bias)
