"""Arrays between Keras and torch, whatever the backend: Keras's values become numpy arrays, and the
engine's torch tensors share their memory.

torch knows no numpy type bfloat16; such an array is viewed as 16-bit integers.
"""

from typing import Any

import keras
import numpy as np
import torch
from torch import Tensor

_BFLOAT16 = "bfloat16"


def to_array(value: Any) -> "np.ndarray[Any, Any]":
    """Return a copy of a tensor, a Keras variable, an array, a number or nested lists of numbers.

    The copy is contiguous and may be written to.
    """
    if isinstance(value, keras.Variable):
        value = keras.ops.convert_to_tensor(value)
    if keras.ops.is_tensor(value):
        value = keras.ops.convert_to_numpy(value)
    return np.array(value, order="C")


def to_torch(array: "np.ndarray[Any, Any]") -> Tensor:
    """Return a tensor with the memory of this array; raise TypeError for text and objects."""
    if array.dtype.name == _BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def from_torch(tensor: Tensor) -> "np.ndarray[Any, Any]":
    """Return an array with the memory of this tensor."""
    if tensor.dtype == torch.bfloat16:
        # Keras depends on ml_dtypes, which gives numpy this type.
        import ml_dtypes

        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def like(value: Any, array: "np.ndarray[Any, Any]") -> Any:
    """Return the array in the form of `value`: a tensor of the backend for a tensor or variable."""
    if keras.ops.is_tensor(value) or isinstance(value, keras.Variable):
        return keras.ops.convert_to_tensor(array)
    return array
