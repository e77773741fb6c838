"""`2bit:t`: MXNet's 2-bit compression, a sixteenth of the bytes, with MXNet's bits.

    value >= t   sends 11, decoded as  t
    value <= -t  sends 10, decoded as -t
    else         sends 00, decoded as  0

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
_MEANING = table(2, {0b00: 0, 0b01: 0, 0b10: -1, 0b11: 1}, torch.int32)


class TwoBit:
    """Sends 2 bits for each value."""

    block: int | None = BLOCK

    def __init__(self, text: str, threshold: float) -> None:
        self.text, self.threshold = text, threshold

    def nbytes(self, numel: int) -> int:
        return padded(numel, _PER_BYTE)

    def encode_block(self, values: Tensor, out: Tensor) -> None:
        signs = torch.zeros(out.numel() * _PER_BYTE, dtype=torch.int8)
        # The conversion rounds toward zero. A quotient is 1 or more only for values >= t: division
        # is rounded correctly, and the largest float below t divided by t is below 1.
        quotients = (values / self.threshold).clamp_(-1, 1).nan_to_num_()
        signs[: values.numel()].copy_(quotients)
        # Four signs, 00, 01 or ff, in each int32: 3 where the lowest bit is set, less 1 for ff.
        fours = signs.view(torch.int32)
        codes = (fours & _ONES).mul_(3)
        codes -= fours.bitwise_right_shift_(1).bitwise_and_(_ONES)
        pack_2bit(codes, out)

    def decode_block(self, encoded: Tensor, out: Tensor) -> None:
        unpack(encoded, _MEANING, out)
        out.mul_(self.threshold)
