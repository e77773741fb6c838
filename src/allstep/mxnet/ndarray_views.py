"""From an NDArray to a torch tensor and back, by DLPack: the same memory, no copy.

MXNet computes in threads of its own. A view is given out when the operations before it are done:
for reading, when nothing writes to the array any more; for writing, when nothing uses it. The
collectives return when they have finished, so MXNet's later operations see their results.
"""

from typing import Any

from torch import Tensor
from torch.utils import dlpack

from allstep.mxnet.framework import mx
from allstep.mxnet.mxnet_errors import InvalidArgument

# MXNet has no types.
NDArray = Any

_from_dlpack: Any = dlpack.from_dlpack
# torch does not list this name for type checkers.
_to_dlpack: Any = dlpack.to_dlpack  # type: ignore[attr-defined]


def read_view(array: NDArray) -> Tensor:
    """Return a tensor with the memory of an array, once nothing writes to it."""
    _check(array)
    view: Tensor = _from_dlpack(array.to_dlpack_for_read())
    return view


def write_view(array: NDArray) -> Tensor:
    """Return a tensor with the memory of an array, to be written to, once nothing uses it."""
    _check(array)
    view: Tensor = _from_dlpack(array.to_dlpack_for_write())
    return view


def to_mxnet(tensor: Tensor, like: NDArray) -> NDArray:
    """Return an array with the memory of a tensor.

    `like`: an array of the kind to return, `mx.nd`'s or `mx.np`'s, and on the same device. MXNet
    distinguishes several CPU devices, which is the one case that needs a copy.
    """
    array = mx.nd.from_dlpack(_to_dlpack(tensor.contiguous())).as_in_context(like.context)
    return array.as_np_ndarray() if isinstance(like, mx.np.ndarray) else array


def _check(array: NDArray) -> None:
    if not isinstance(array, mx.nd.NDArray):
        raise InvalidArgument(
            f"found {type(array).__name__}, expected an NDArray: write mx.nd.array(value)"
        )
    if array.stype != "default":
        raise InvalidArgument(
            f"found an NDArray of storage type {array.stype!r}, expected a dense one: write"
            " array.tostype('default')"
        )
    if _is_bool(array):
        raise InvalidArgument(
            f"found an NDArray of dtype bool with shape {array.shape}, which MXNet does not export:"
            " write array.astype('uint8')"
        )


def _is_bool(array: NDArray) -> bool:
    return str(getattr(array.dtype, "__name__", array.dtype)) in ("bool", "bool_")
