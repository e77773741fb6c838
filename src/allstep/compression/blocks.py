"""The protocol of a codec, and the walk over the blocks of a tensor.

An encoding is a chain of simple operations. On 32 MB each of them would read and write main memory;
on a block of 256 KB all but the first find their input in the core's cache. So a codec sees one
block of at most `BLOCK` elements, and this module walks over the tensor::

    values    | block 0 (65,536 elements) | block 1 | ... | rest |
    encoded   | its bytes | its bytes | ... | its bytes |

Scales, and the elements that `topk` selects, are those of a block. A codec without bound (`block`
is None, PowerSGD) gets the whole tensor as one block.

Every block's bytes are a multiple of 4, so that float32 and int32 views of them are aligned.
"""

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

BLOCK = 1 << 16
"""Elements of a block: 256 KB of float32."""


class Codec(Protocol):
    """Encodes one block of a tensor at a time; the same codec serves any number of tensors.

    text: what `codec_from` reads. block: elements encoded together; None for a whole tensor.
    """

    text: str
    block: int | None

    def nbytes(self, numel: int) -> int:
        """Return the bytes of an encoded block of `numel` elements, a multiple of 4."""

    def encode_block(self, values: Tensor, out: Tensor) -> None:
        """Write the encoding of `values` to `out`, uint8."""

    def decode_block(self, encoded: Tensor, out: Tensor) -> None:
        """Write the values that were encoded, as far as the codec keeps them, to `out`."""


class Block(NamedTuple):
    """One block: its elements, and its bytes."""

    elements: slice
    encoded: slice


def blocks(codec: Codec, numel: int) -> Iterator[Block]:
    """Yield the blocks of a tensor of `numel` elements."""
    size, at = codec.block or max(1, numel), 0
    for start in range(0, numel, size):
        end = min(numel, start + size)
        until = at + codec.nbytes(end - start)
        yield Block(slice(start, end), slice(at, until))
        at = until


def encoded_nbytes(codec: Codec, numel: int) -> int:
    """Return the size of an encoded tensor of `numel` elements."""
    if not codec.block:
        return codec.nbytes(numel) if numel else 0
    whole, rest = divmod(numel, codec.block)
    return whole * codec.nbytes(codec.block) + (codec.nbytes(rest) if rest else 0)


def encode(codec: Codec, values: Tensor, out: Tensor | None = None) -> Tensor:
    """Return `values` encoded, as uint8. out: where to write; new memory if None."""
    check_values(values)
    encoded = room_for(codec, values.numel(), out)
    for block in blocks(codec, values.numel()):
        codec.encode_block(values[block.elements], encoded[block.encoded])
    return encoded


def decode(codec: Codec, encoded: Tensor, out: Tensor) -> Tensor:
    """Write the values of `encoded` to `out`, and return it."""
    check_values(out)
    check_encoded(codec, encoded, out.numel())
    for block in blocks(codec, out.numel()):
        codec.decode_block(encoded[block.encoded], out[block.elements])
    return out


def add_decoded(codec: Codec, encoded: Tensor, to: Tensor) -> None:
    """Add the values of `encoded` to `to`, block by block."""
    check_values(to)
    check_encoded(codec, encoded, to.numel())
    scratch = torch.empty(min(to.numel(), codec.block or to.numel()))
    for block in blocks(codec, to.numel()):
        part = to[block.elements]
        sent = scratch[: part.numel()]
        codec.decode_block(encoded[block.encoded], sent)
        part.add_(sent)


def room_for(codec: Codec, numel: int, out: Tensor | None) -> Tensor:
    """Return `out`, or new memory for the encoding of `numel` elements."""
    if out is None:
        return torch.empty(encoded_nbytes(codec, numel), dtype=torch.uint8)
    check_encoded(codec, out, numel)
    return out


def check_values(values: Tensor) -> None:
    """Raise ValueError unless `values` is a tensor that a codec can read or write."""
    if values.dtype is not torch.float32 or values.dim() != 1 or not values.is_contiguous():
        raise ValueError(
            f"found {values.dtype} {list(values.shape)}; codecs take flat, contiguous float32"
        )


def check_encoded(codec: Codec, encoded: Tensor, numel: int) -> None:
    """Raise ValueError unless `encoded` has type and size of an encoding of `numel` elements."""
    expected = encoded_nbytes(codec, numel)
    if encoded.dtype is not torch.uint8 or encoded.shape != (expected,):
        raise ValueError(
            f"found {encoded.dtype} {list(encoded.shape)}; {codec.text} of {numel} elements is"
            f" {expected} bytes of uint8"
        )
