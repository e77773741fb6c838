"""Compressors, which cast gradients to fewer bits before a reduction and back after it.

A compressor is a class with two static methods on NDArrays; users may provide their own.
"""

from typing import Any

import numpy as np

from allstep.mxnet.ndarray_views import NDArray


class Compressor:
    """The interface of a compressor."""

    @staticmethod
    def compress(tensor: NDArray) -> tuple[NDArray, Any]:
        """Return the array to send, and a context for `decompress`."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: NDArray, ctx: Any) -> NDArray:
        """Return the received array in the form that the caller expects."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends arrays unchanged."""

    @staticmethod
    def compress(tensor: NDArray) -> tuple[NDArray, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: NDArray, ctx: Any) -> NDArray:
        return tensor


class FP16Compressor(Compressor):
    """Sends floating-point arrays in half precision, other arrays unchanged."""

    @staticmethod
    def compress(tensor: NDArray) -> tuple[NDArray, Any]:
        is_float = np.issubdtype(np.dtype(tensor.dtype), np.floating)
        sent = tensor.astype("float16", copy=False) if is_float else tensor
        return sent, tensor.dtype

    @staticmethod
    def decompress(tensor: NDArray, ctx: Any) -> NDArray:
        return tensor.astype(ctx, copy=False)


class Compression:
    """The compressors by name."""

    none = NoneCompressor
    fp16 = FP16Compressor
