"""`fp16` and `bf16`: half precision, half the bytes.

bf16 has the range of float32 and 8 bits of precision; fp16 has 11, and numbers above 65,504 become
infinite.
"""

import torch
from torch import Tensor

from allstep.compression.blocks import BLOCK


class Cast:
    """Sends values in another floating-point type of 16 bits."""

    block: int | None = BLOCK

    def __init__(self, text: str, dtype: torch.dtype) -> None:
        self.text, self._dtype = text, dtype

    def nbytes(self, numel: int) -> int:
        return (numel + numel % 2) * 2

    def encode_block(self, values: Tensor, out: Tensor) -> None:
        half = out.view(self._dtype)
        half[: values.numel()].copy_(values)
        # An odd number of values leaves room for one more.
        half[values.numel() :].zero_()

    def decode_block(self, encoded: Tensor, out: Tensor) -> None:
        out.copy_(encoded.view(self._dtype)[: out.numel()])
