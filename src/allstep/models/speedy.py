"""A small, fast model for CIFAR-10, after models that reach 94% in seconds on one GPU.

Their paper: Jordan 2024, https://arxiv.org/abs/2404.00498.

```
image (3, 32, 32)
  2x2 whitening convolution, fixed, with a trained bias -> GELU             24 x 31 x 31
  group: 3x3 conv -> max-pool -> norm -> GELU -> 3x3 conv -> norm -> GELU   64 x 15 x 15
  group                                                                    256 x  7 x  7
  group                                                                    256 x  3 x  3
  max-pool over the image -> linear, no bias -> x 1/9                      num_classes
```

The weights of the first convolution are not trained: `whiten(images)` sets them to the principal
directions of 2x2 patches of training images, each scaled to the same variance, and to the negative
of each, so that GELU keeps both signs. The other convolutions start as the identity on their first
channels (Dirac), so that a deep model propagates images from the first step. 1,972,792 parameters
at widths 64, 256, 256, of which 288 are fixed.
"""

import torch
from torch import nn

from allstep.models.norms import Norm

_PATCH = 2
"""Side of the patches that are whitened, in pixels."""


class Speedy(nn.Module):
    """A fast model: images (n, channels, height, width) in, logits (n, num_classes) out.

    Both sides of an image have at least 9 pixels. `widths` are the channels of the three groups.
    `scale` is the factor of the logits. `norm` makes the norm layer for a number of channels
    (default: batch norm). Call `whiten` before training.
    """

    def __init__(
        self,
        num_classes: int = 10,
        channels: int = 3,
        *,
        widths: tuple[int, int, int] = (64, 256, 256),
        scale: float = 1 / 9,
        norm: Norm = nn.BatchNorm2d,
    ) -> None:
        super().__init__()
        wide = 2 * channels * _PATCH**2
        self.whitening = nn.Conv2d(channels, wide, _PATCH)
        self.whitening.weight.requires_grad_(False)
        self.groups = nn.Sequential(nn.GELU())
        for width in widths:
            self.groups.append(_group(wide, width, norm))
            wide = width
        self.head = nn.Sequential(
            nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(wide, num_classes, bias=False)
        )
        self.scale = scale
        self._initialise()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.groups(self.whitening(images)))
        return logits * self.scale

    def _initialise(self) -> None:
        assert self.whitening.bias is not None
        nn.init.zeros_(self.whitening.bias)
        for layer in self.groups.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.dirac_(layer.weight[: layer.in_channels])

    @torch.no_grad()
    def whiten(self, images: torch.Tensor, floor: float = 5e-4) -> None:
        """Set the weights of the first convolution from training images.

        `images` (n, channels, height, width) are normalized as in training; some thousands are
        enough. `floor` is added to each variance before the division by its square root, so that
        directions without variance are not amplified.
        """
        patches = nn.functional.unfold(images.double(), _PATCH).transpose(1, 2).flatten(0, 1)
        covariance = patches.T @ patches / len(patches)
        variances, directions = torch.linalg.eigh(covariance)
        # The direction with the largest variance comes first.
        filters = (directions / (variances + floor).sqrt()).T.flip(0)
        shape = (-1, *self.whitening.weight.shape[1:])
        self.whitening.weight.copy_(torch.cat([filters, -filters]).reshape(shape))


def _group(channels: int, wide: int, norm: Norm) -> nn.Sequential:
    """Return two convolutions with norms and GELU; the first one is pooled."""
    first, second = (
        nn.Conv2d(inside, wide, 3, padding="same", bias=False) for inside in (channels, wide)
    )
    return nn.Sequential(
        first, nn.MaxPool2d(2), norm(wide), nn.GELU(), second, norm(wide), nn.GELU()
    )
