"""Sending gradients in fewer bits: what is cast before a reduction and back after it.

A compressor is a class with two static methods; users may bring their own. Averages are formed in
the compressed type, so fp16 can overflow where bf16, which has the range of float32, cannot.
"""

from typing import Any

import torch
from torch import Tensor


class Compressor:
    """What a compressor offers."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """The tensor to send, and what `decompress` needs to know."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """The tensor that came back, as the caller wants it."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends tensors as they are."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return tensor


class _Cast(Compressor):
    """Sends floating-point tensors in another type; the others as they are."""

    dtype: torch.dtype

    @classmethod
    def compress(cls, tensor: Tensor) -> tuple[Tensor, Any]:
        return (
            (tensor.to(cls.dtype), tensor.dtype) if tensor.is_floating_point() else (tensor, None)
        )

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return tensor if ctx is None else tensor.to(ctx)


class FP16Compressor(_Cast):
    """Floating-point tensors travel in half precision."""

    dtype = torch.float16


class BF16Compressor(_Cast):
    """Floating-point tensors travel in bfloat16: half the bytes with the range of float32.

    Not in Horovod.
    """

    dtype = torch.bfloat16


class Compression:
    """The compressors by name."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
