"""`2bit:t`: MXNet's 2-bit compression, a sixteenth of the bytes, with MXNet's bits. `2bit` has a
scale for each block instead of a threshold.

    2bit:t    | bits |                      2bit    | scale, float32 | bits |

    value >= t   sends 11, decoded as  t    (2bit: as the scale)
    value <= -t  sends 10, decoded as -t
    else         sends 00, decoded as  0

Without a threshold, t is 0.7 of the block's mean absolute value, and the scale is the mean of the
values above it: the error is then about the smallest that three values can have (Li and Liu, arXiv
1605.04711), whatever the size of the values. So it suits differences of weights, whose size changes
during a run.

16 values are in the bytes of one float32, the first value in the highest bits of its byte. It needs
error feedback, with which values below t are sent once they have added up. NaN is sent as 0 and
stays in the residual.
"""

import torch
from torch import Tensor

from allstep.compression.blocks import BLOCK
from allstep.compression.packed_bits import pack_2bit, padded, table, unpack

_PER_BYTE = 4
_ONES = 0x01010101
_OF_MEAN = 0.7
_SCALE = 4  # Bytes.
# Below it a quotient might overflow: such a block is sent as zeros.
_LEAST = 1e-37
_MEANING = table(2, {0b00: 0, 0b01: 0, 0b10: -1, 0b11: 1}, torch.int32)


class TwoBit:
    """Sends 2 bits for each value: MXNet's with a threshold, with a scale if it is None."""

    block: int | None = BLOCK

    def __init__(self, text: str, threshold: float | None) -> None:
        self.text, self.threshold = text, threshold
        self._start = _SCALE if threshold is None else 0

    def nbytes(self, numel: int) -> int:
        return self._start + padded(numel, _PER_BYTE)

    def encode_block(self, values: Tensor, out: Tensor) -> None:
        bits = out[self._start :]
        signs = torch.zeros(bits.numel() * _PER_BYTE, dtype=torch.int8)
        threshold = self.threshold
        if threshold is None:
            threshold = max(float(values.abs().mean()) * _OF_MEAN, _LEAST)
        # The conversion rounds toward zero. A quotient is 1 or more only for values >= t: division
        # is rounded correctly, and the largest float below t divided by t is below 1.
        quotients = (values / threshold).clamp_(-1, 1).nan_to_num_()
        if self.threshold is None:
            quotients.trunc_()
            scale = torch.dot(values, quotients) / quotients.abs().sum().clamp_min_(1)
            out[:_SCALE].view(torch.float32).copy_(scale)
        signs[: values.numel()].copy_(quotients)
        # Four signs, 00, 01 or ff, in each int32: 3 where the lowest bit is set, less 1 for ff.
        fours = signs.view(torch.int32)
        codes = (fours & _ONES).mul_(3)
        codes -= fours.bitwise_right_shift_(1).bitwise_and_(_ONES)
        pack_2bit(codes, bits)

    def decode_block(self, encoded: Tensor, out: Tensor) -> None:
        unpack(encoded[self._start :], _MEANING, out)
        if self.threshold is None:
            out.mul_(encoded[:_SCALE].view(torch.float32))
        else:
            out.mul_(self.threshold)
