"""Compressors, which cast gradients to fewer bits before a reduction and back after it.

A compressor is a class with two static methods; users may provide their own. Averages are computed
in the compressed type, so fp16 can overflow where bf16, which has the range of float32, cannot.
"""

from typing import Any

import torch
from torch import Tensor


class Compressor:
    """The interface of a compressor."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Return the tensor to send, and a context for `decompress`."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """Return the received tensor in the form that the caller expects."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends tensors unchanged."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return tensor


class _Cast(Compressor):
    """Sends floating-point tensors in another type, other tensors unchanged."""

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
    """Sends floating-point tensors in half precision."""

    dtype = torch.float16


class BF16Compressor(_Cast):
    """Sends floating-point tensors in bfloat16: half the bytes with the range of float32.

    Not in Horovod.
    """

    dtype = torch.bfloat16


class Compression:
    """The compressors by name."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
