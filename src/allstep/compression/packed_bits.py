"""One or two bits for each value, packed into bytes as MXNet does: the first value in the highest
bits of its byte.

Packing multiplies integers. An integer holds one small number in each of its bytes; the product
with a constant that has one bit for each of them shifts every number to its place in the highest
byte. Products of other pairs fall elsewhere and, being distinct, carry nothing into it::

    int32 (2 bits a value, little-endian)   c0 | c1 << 8 | c2 << 16 | c3 << 24
    x (1 << 30 | 1 << 20 | 1 << 10 | 1)     highest byte: c0 << 6 | c1 << 4 | c2 << 2 | c3

Unpacking looks each byte up in a table of 256 integers, one small number in each of their bytes.
"""

import sys

import torch
from torch import Tensor

# The integers are read as bytes; a big-endian machine has them in another order.
assert sys.byteorder == "little"


def _signed(number: int, bits: int) -> int:
    return number - (1 << bits) if number >> (bits - 1) else number


_SHIFT_4 = _signed(sum(1 << (30 - 10 * place) for place in range(4)), 32)
_SHIFT_8 = _signed(sum(1 << (63 - 9 * place) for place in range(8)), 64)


def pack_2bit(codes: Tensor, out: Tensor) -> None:
    """Pack int32 of four 2-bit codes each into bytes of `out`; `codes` is overwritten."""
    highest = codes.mul_(_SHIFT_4).view(torch.uint8)[3::4]
    out.copy_(highest)


def pack_1bit(flags: Tensor, out: Tensor) -> None:
    """Pack int64 of eight 0 or 1 each into bytes of `out`; `flags` is overwritten."""
    highest = flags.mul_(_SHIFT_8).view(torch.uint8)[7::8]
    out.copy_(highest)


def table(bits: int, meaning: dict[int, int], dtype: torch.dtype) -> Tensor:
    """Return for each byte an integer with the meanings of its codes, int8, in its bytes.

    bits: of a code, 1 or 2. dtype: int64 for 1 bit (8 values), int32 for 2 bits (4 values).
    """
    mask = (1 << bits) - 1
    rows = [
        [meaning[byte >> shift & mask] for shift in range(8 - bits, -1, -bits)]
        for byte in range(256)
    ]
    return torch.tensor(rows, dtype=torch.int8).view(dtype).reshape(-1)


def unpack(encoded: Tensor, meanings: Tensor, out: Tensor) -> None:
    """Write the meaning of each code in `encoded` to `out`. meanings: from `table`."""
    found = torch.index_select(meanings, 0, encoded.int()).view(torch.int8)
    out.copy_(found[: out.numel()])


def padded(numel: int, values_per_byte: int) -> int:
    """Return the bytes of `numel` packed values, a multiple of 4."""
    return -(-numel // (4 * values_per_byte)) * 4
