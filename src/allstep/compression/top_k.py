"""`topk:1%`: of each block, the values that are largest without sign, with their places.

    | k values, float32 | k places, uint16 |        k = 1% of the block, at least 1

It needs error feedback. Selecting is what costs (torch.topk on a block takes most of the time), so
the values above a limit are taken first, a limit that 1.5 k of them exceed in a sample, and the k
largest are selected among those. The result is that of a selection over the whole block.
"""

import math

import torch
from torch import Tensor

from allstep.compression.blocks import BLOCK

_BYTES = 4 + 2  # A value and its place.
_SAMPLE = 16  # One value in so many.
_MORE = 1.5  # What a limit from the sample lets through, compared with k.


class TopK:
    """Sends a fraction of the values. fraction: above 0 and at most 1."""

    block: int | None = BLOCK

    def __init__(self, text: str, fraction: float) -> None:
        self.text, self.fraction = text, fraction

    def num_sent(self, numel: int) -> int:
        """Return how many of `numel` values are sent."""
        return min(numel, max(1, math.ceil(numel * self.fraction)))

    def nbytes(self, numel: int) -> int:
        return -(-self.num_sent(numel) * _BYTES // 4) * 4

    def encode_block(self, values: Tensor, out: Tensor) -> None:
        number = self.num_sent(values.numel())
        places = largest(values.abs(), number)
        torch.index_select(values, 0, places, out=out[: 4 * number].view(torch.float32))
        # 65,535 does not fit into int16; the conversion keeps its 16 bits.
        out[4 * number : _BYTES * number].view(torch.int16).copy_(places)
        out[_BYTES * number :].zero_()

    def decode_block(self, encoded: Tensor, out: Tensor) -> None:
        number = self.num_sent(out.numel())
        places = encoded[4 * number : _BYTES * number].view(torch.int16).long() & 0xFFFF
        out.zero_().index_copy_(0, places, encoded[: 4 * number].view(torch.float32))


def largest(sizes: Tensor, number: int) -> Tensor:
    """Return the places of the `number` largest of `sizes`."""
    wanted = int(number * _MORE / _SAMPLE)
    sample = sizes[::_SAMPLE]
    if 0 < wanted < sample.numel() // 4:
        limit = torch.topk(sample, wanted, sorted=False).values.amin()
        found = torch.nonzero(sizes >= limit).view(-1)
        if found.numel() >= number:
            return found[torch.topk(sizes[found], number, sorted=False).indices]
    return torch.topk(sizes, number, sorted=False).indices
