"""`1bit`: the sign of each value, a 32nd of the bytes. `1bit:t` is MXNet's, with MXNet's bits.

    1bit      | scale, float32 | bits |    > 0 sends 1, decoded as scale, else 0, decoded as -scale
    1bit:t    | bits |                     > t sends 1, decoded as 1,     else 0, decoded as -1

32 values are in the bytes of one float32, the first value in the highest bit of its byte. The scale
is the mean of the block's absolute values, which keeps the error smallest. MXNet has no scale: its
gradients must be of the size of 1. Both need error feedback.
"""

import torch
from torch import Tensor

from allstep.compression.blocks import BLOCK
from allstep.compression.packed_bits import pack_1bit, padded, table, unpack

_PER_BYTE = 8
_SCALE = 4  # Bytes.
_MEANING = table(1, {0: -1, 1: 1}, torch.int64)


class OneBit:
    """Sends 1 bit for each value: MXNet's with a threshold, with a scale if it is None."""

    block: int | None = BLOCK

    def __init__(self, text: str, threshold: float | None) -> None:
        self.text, self.threshold = text, threshold
        self._start = _SCALE if threshold is None else 0

    def nbytes(self, numel: int) -> int:
        return self._start + padded(numel, _PER_BYTE)

    def encode_block(self, values: Tensor, out: Tensor) -> None:
        bits = out[self._start :]
        flags = torch.zeros(bits.numel() * _PER_BYTE, dtype=torch.bool)
        torch.gt(values, self.threshold or 0.0, out=flags[: values.numel()])
        pack_1bit(flags.view(torch.int64), bits)
        if self._start:
            out[:_SCALE].view(torch.float32).copy_(values.abs().mean())

    def decode_block(self, encoded: Tensor, out: Tensor) -> None:
        unpack(encoded[self._start :], _MEANING, out)
        if self._start:
            out.mul_(encoded[:_SCALE].view(torch.float32))
