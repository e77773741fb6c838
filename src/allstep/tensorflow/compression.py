"""Compressors, which cast tensors to fewer bits before a reduction and back after it.

A compressor is a class with two static methods; users may provide their own. Averages are computed
in the compressed type, so fp16 can overflow where bf16, which has the range of float32, cannot.
"""

from typing import Any

import tensorflow as tf


class Compressor:
    """The interface of a compressor."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return the tensor to send, and a context for `decompress`."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return the received tensor in the form that the caller expects."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends tensors unchanged."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tensor


class _Cast(Compressor):
    """Sends floating-point tensors in another type, other tensors unchanged."""

    dtype: Any

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        dtype = tensor.dtype
        return (tf.cast(tensor, cls.dtype), dtype) if dtype.is_floating else (tensor, None)

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tensor if ctx is None else tf.cast(tensor, ctx)


class FP16Compressor(_Cast):
    """Sends floating-point tensors in half precision."""

    dtype = tf.float16


class BF16Compressor(_Cast):
    """Sends floating-point tensors in bfloat16: half the bytes with the range of float32.

    Not in Horovod.
    """

    dtype = tf.bfloat16


class Compression:
    """The compressors by name."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
