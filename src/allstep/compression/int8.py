"""`int8`: a quarter of the bytes. Values are rounded to 255 steps of the block's largest one.

    | scale, float32 | int8 of each value |        value = scale * int8,  scale = largest / 127

A block with a number that is not finite decodes to NaN, so that a diverged run is noticed.
"""

import torch
from torch import Tensor

from allstep.compression.blocks import BLOCK

_STEPS = 127
_SCALE = 4  # Bytes.


class Int8:
    """Sends 8 bits for each value, with one scale for each block."""

    text = "int8"
    block: int | None = BLOCK

    def nbytes(self, numel: int) -> int:
        return _SCALE + -(-numel // 4) * 4

    def encode_block(self, values: Tensor, out: Tensor) -> None:
        low, high = torch.aminmax(values)
        scale = torch.maximum(high, -low) / _STEPS
        out[:_SCALE].view(torch.float32).copy_(scale)
        # Zeros, or numbers so small that the scale is zero: 0 / 1.
        steps = (values / torch.where(scale == 0, 1.0, scale)).round_()
        numbers = out[_SCALE:].view(torch.int8)
        numbers[: values.numel()].copy_(steps.clamp_(-_STEPS, _STEPS).nan_to_num_())
        numbers[values.numel() :].zero_()

    def decode_block(self, encoded: Tensor, out: Tensor) -> None:
        scale = encoded[:_SCALE].view(torch.float32)
        out.copy_(encoded[_SCALE:].view(torch.int8)[: out.numel()]).mul_(scale)
        if not torch.isfinite(scale):
            out.fill_(torch.nan)
