"""Normalize pixel values from 0 to 255: (value / 255 - mean) / std, for each channel.

This is the last step on a batch and runs on the batch's device, so that uint8 is copied to the
device: a quarter of the bytes that float32 would take.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from allstep.data.random.draws import Draws
from allstep.errors import ConfigError


class Normalize:
    """Subtract `mean` and divide by `std`, as torchvision's Normalize does.

    Both are on the scale 0 to 1, one number per channel or one for all channels. `dtype` is the
    type of the result (default: float32).
    """

    on_batches = True

    def __init__(
        self,
        mean: float | Sequence[float],
        std: float | Sequence[float],
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.mean, self.std, self.dtype = _figures(mean), _figures(std), dtype
        if max(self.mean) > 1:
            raise ConfigError(
                f"the mean of Normalize is on the scale 0 to 1, not {self.mean}: divide it and the"
                " std by 255"
            )
        if min(self.std) <= 0:
            raise ConfigError(f"the std of Normalize must be above 0, not {self.std}")
        if len(self.mean) != len(self.std):
            raise ConfigError(
                f"Normalize has {len(self.mean)} means but {len(self.std)} stds; give equally many"
            )

    def __call__(
        self, data: Tensor, target: Tensor, draws: Draws, stream: str
    ) -> tuple[Tensor, Tensor]:
        """Return normalized `data`, and `target` unchanged.

        `data` is (n, channels, height, width) on the scale 0 to 255, of any type.
        """
        if len(self.mean) not in (1, data.shape[1]):
            raise ConfigError(
                f"{self!r} has {len(self.mean)} channels, the images have {data.shape[1]}"
            )
        mean, std = (
            torch.tensor(x, device=data.device).view(1, -1, 1, 1) for x in (self.mean, self.std)
        )
        return (data - mean * 255).mul_(1 / (std * 255)).to(self.dtype), target

    def __repr__(self) -> str:
        return f"Normalize({self.mean}, {self.std})"


def _figures(value: float | Sequence[float]) -> tuple[float, ...]:
    try:
        figures = tuple(
            float(figure) for figure in (value if isinstance(value, Iterable) else (value,))
        )
    except (TypeError, ValueError):
        raise ConfigError(f"Normalize takes numbers, one for each channel, not {value!r}") from None
    if not figures:
        raise ConfigError("Normalize needs a mean and a std for each channel")
    return figures
