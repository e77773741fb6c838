"""Tensors between TensorFlow and torch, without a copy where the memory allows it (DLPack).

```
to_torch       a view of TensorFlow's memory: read only. It may be a variable's own memory.
to_tensorflow  hands our memory over: do not write to it afterwards.
```

DLPack does not take bool, uint16 and empty tensors in every version of TensorFlow; numpy does.
TensorFlow ends the process when a kernel reads memory that is not aligned (`ALIGNMENT`), so such a
tensor is copied.
"""

from collections.abc import Sequence
from typing import Any

import numpy
import tensorflow as tf
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

from allstep.parallel.exchange.array_list import ALIGNMENT

_BY_NUMPY = (torch.bool, torch.uint16)
_DTYPES: dict[Any, torch.dtype] = {
    dtype: getattr(torch, dtype.name)
    for dtype in (
        tf.bool,
        tf.uint8,
        tf.int8,
        tf.uint16,
        tf.int16,
        tf.int32,
        tf.int64,
        tf.float16,
        tf.bfloat16,
        tf.float32,
        tf.float64,
        tf.complex64,
        tf.complex128,
    )
}


def torch_dtype(dtype: Any) -> torch.dtype:
    """Return torch's dtype for TensorFlow's; raise ValueError if there is none."""
    try:
        return _DTYPES[tf.as_dtype(dtype)]
    except KeyError:
        known = ", ".join(sorted(each.name for each in _DTYPES))
        raise ValueError(
            f"tensors of dtype {tf.as_dtype(dtype).name} cannot be sent; there are {known}"
        ) from None


def to_torch(tensor: Any) -> Tensor:
    """Return a view of an eager tensor. It must not be written to."""
    dtype = torch_dtype(tensor.dtype)
    if 0 in tensor.shape:
        return torch.empty(tuple(tensor.shape), dtype=dtype)
    if dtype in _BY_NUMPY:
        return torch.from_numpy(numpy.array(tensor.numpy()))
    return _view(tensor)


def is_plain(tensor: Any) -> bool:
    """Return whether a graph knows that DLPack takes all values of this tensor."""
    dtype, shape = _DTYPES.get(tensor.dtype), tensor.shape
    takes_dtype = dtype is not None and dtype not in _BY_NUMPY
    return takes_dtype and shape.is_fully_defined() and 0 not in shape


def to_views(tensors: Sequence[Any], plain: Sequence[bool]) -> list[Tensor]:
    """Return views as `to_torch` does; `plain`: `is_plain` of each.

    To look at the shape and dtype of a value takes as long as the view itself.
    """
    return [
        _view(tensor) if known else to_torch(tensor)
        for tensor, known in zip(tensors, plain, strict=True)
    ]


def _view(tensor: Any) -> Tensor:
    return from_dlpack(tf.experimental.dlpack.to_dlpack(tensor))


def to_tensorflow(tensor: Tensor) -> Any:
    """Return an eager tensor with the memory of ours; a copy where TensorFlow cannot use it."""
    if not tensor.numel():
        return tf.zeros(tuple(tensor.shape), tf.as_dtype(str(tensor.dtype).removeprefix("torch.")))
    if tensor.dtype in _BY_NUMPY:
        return tf.convert_to_tensor(numpy.array(tensor.detach().cpu().numpy()))
    return tf.experimental.dlpack.from_dlpack(to_dlpack(_aligned(tensor)))


def _aligned(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy, such that TensorFlow can use its memory."""
    whole = (tensor.detach() if tensor.requires_grad else tensor).contiguous()
    return whole.clone() if whole.data_ptr() % ALIGNMENT else whole
