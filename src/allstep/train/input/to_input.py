"""From stored images to what a model wants: floats, of mean 0 and std 1 in each channel, on its
device.

```
batch.data   uint8 (n, height, width), or (n, channels, height, width) in the memory of (n, height, width, channels)
             | to the device, as bytes: a quarter of what floats would be
             | to floats, in memory of their own
             | - mean, x 1/std, where they lie
input        (n, channels, height, width), channels-last or plain
```

Three colours lie side by side, and subtracting three figures from rows of three is slow. So the
figures are repeated as often as a row has pixels, and whole rows are subtracted: three to six times
as fast on a CPU (256 images of 32x32, or 32 of 224x224).
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

ToInput = Callable[[Tensor], Tensor]


def make_to_input(
    mean: Sequence[float] | None,
    std: Sequence[float] | None,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    channels_last: bool = True,
) -> ToInput:
    """A function from the images of a batch to a model's input; what it is given is left as it was."""
    if mean is None or std is None:
        raise ValueError("mean and std are not known yet: measure(splits) first")
    shift = torch.tensor(mean, dtype=torch.float64).to(device, dtype)
    scale = (1 / torch.tensor(std, dtype=torch.float64)).to(device, dtype)
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    rows: dict[int, tuple[Tensor, Tensor]] = {}  # the figures, repeated for each width of images

    def to_input(stored: Tensor) -> Tensor:
        images = stored.to(device, non_blocking=True)
        images = images.unsqueeze(1) if images.ndim == 3 else images
        if len(shift) > 1 and images.is_contiguous(memory_format=torch.channels_last):
            width = images.shape[3]
            if width not in rows:
                rows[width] = shift.repeat(width), scale.repeat(width)
            made = _by_rows(images, dtype, *rows[width])
        else:
            made = (
                images.to(dtype, copy=True)
                .sub_(shift.view(1, -1, 1, 1))
                .mul_(scale.view(1, -1, 1, 1))
            )
        return made.contiguous(memory_format=memory_format)

    return to_input


def _by_rows(images: Tensor, dtype: torch.dtype, shift: Tensor, scale: Tensor) -> Tensor:
    """Of channels-last images, whose rows are width x channels values one after the other."""
    lying = images.permute(0, 2, 3, 1)
    made = lying.to(dtype, copy=True)
    made.view(-1, len(shift)).sub_(shift).mul_(scale)
    return made.permute(0, 3, 1, 2)
