"""Error feedback: what a codec drops from one gradient is added to the next one.

    residual += gradient;  send encode(residual);  residual -= decode(what was sent)

So nothing is lost permanently: the sum of what was sent, plus the residual, is the sum of the
gradients. Codecs that send few bits converge with it and diverge without it (Seide et al. 2014,
Karimireddy et al., arXiv 1901.09847).

A number that is not finite stays out of the residual: it would make every later one NaN, while one
such gradient is normal where a loss scale is being searched for.

The residual belongs to one sender and one tensor: each worker has its own, and it ends with the
worker. It is applied block by block, while a block is in cache.
"""

import torch
from torch import Tensor

from allstep.compression.blocks import (
    Codec,
    blocks,
    check_values,
    decode,
    room_for,
)


class ErrorFeedback:
    """Encodes the gradients of one tensor. residual: what has not been sent yet; None at first."""

    def __init__(self, codec: Codec, residual: Tensor | None = None) -> None:
        self.codec, self.residual = codec, residual

    def encode(self, gradient: Tensor, out: Tensor | None = None) -> Tensor:
        """Return gradient and residual encoded, and keep the rest as the new residual.

        out: where to write; new memory if None.
        """
        check_values(gradient)
        codec, numel = self.codec, gradient.numel()
        encoded = room_for(codec, numel, out)
        residual = self._residual_for(numel)
        scratch = torch.empty(min(numel, codec.block or numel))
        for block in blocks(codec, numel):
            rest = residual[block.elements].add_(gradient[block.elements])
            bytes_of_block = encoded[block.encoded]
            codec.encode_block(rest, bytes_of_block)
            sent = scratch[: rest.numel()]
            codec.decode_block(bytes_of_block, sent)
            rest.sub_(sent).nan_to_num_(0.0, 0.0, 0.0)
        return encoded

    def quantize(self, gradient: Tensor) -> Tensor:
        """Return what a receiver would decode, for a gradient that stays on this host."""
        encoded = self.encode(gradient)
        return decode(self.codec, encoded, torch.empty_like(gradient))

    def _residual_for(self, numel: int) -> Tensor:
        if self.residual is None:
            self.residual = torch.zeros(numel)
        if self.residual.shape != (numel,):
            raise ValueError(
                f"a gradient of {numel} elements after one of {self.residual.numel()}; use one"
                " ErrorFeedback for each tensor"
            )
        return self.residual
