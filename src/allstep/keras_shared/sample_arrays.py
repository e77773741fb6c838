"""Arrays with all samples: one, or lists or dicts of them, and the share of this rank."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from allstep.hvd.place import rank, size


def share_of(samples: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    """Return this rank's consecutive range; the first ranks have one more if it is uneven."""
    each, more = divmod(len(samples), size())
    start = rank() * each + min(rank(), more)
    return samples[start : start + each + (rank() < more)]


def map_arrays(function: Callable[[Any], Any], data: Any) -> Any:
    """Return the data with `function` of each array; None stays None.

    A list becomes a tuple: TensorFlow takes a list for one tensor.
    """
    if isinstance(data, dict):
        return {name: map_arrays(function, each) for name, each in data.items()}
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(map_arrays(function, each) for each in data))
    if isinstance(data, (list, tuple)):
        return tuple(map_arrays(function, each) for each in data)
    return None if data is None else function(data)


def numpy_array(value: Any) -> "np.ndarray[Any, Any]":
    """Return an array that can be indexed by a list of samples; do not copy a numpy array."""
    if isinstance(value, np.ndarray):
        return value
    if not hasattr(value, "__array__"):
        raise ValueError(
            f"{type(value).__name__}: expected arrays with all samples, such as numpy arrays"
        )
    return np.asarray(value)


def common_length(data: Any) -> int:
    """Return the number of samples; raise ValueError if the arrays differ in it."""
    arrays = list(_arrays_of(data))
    lengths = {len(array) if array.ndim else 0 for array in arrays}
    if len(lengths) != 1 or lengths == {0}:
        shapes = ", ".join(str(list(array.shape)) for array in arrays)
        raise ValueError(
            f"arrays of the shapes {shapes}: expected the same number of samples in all, at least 1"
        )
    return lengths.pop()


def _arrays_of(data: Any) -> "Iterator[np.ndarray[Any, Any]]":
    """Yield the arrays of a structure."""
    if isinstance(data, dict):
        data = tuple(data.values())
    if isinstance(data, tuple):
        for each in data:
            yield from _arrays_of(each)
    elif data is not None:
        yield data
