"""Broadcasts of Keras variables: weights and the state of an optimizer.

Variables are sent as bytes, many at once, so that all types are exact and the number of messages
does not depend on the number of variables.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from allstep.hvd.handles import perform
from allstep.hvd.place import rank, size
from allstep.hvd.process_sets import ProcessSet, global_process_set
from allstep.hvd.requests import broadcasting
from allstep.keras.framework_arrays import to_array

_BUNDLE_NBYTES = 64 * 2**20


def broadcast_variables(
    variables: Sequence[Any], root_rank: int = 0, process_set: ProcessSet = global_process_set
) -> None:
    """Copy the values of rank `root_rank` into these Keras variables on all ranks.

    `variables`: such as `model.variables`; all ranks give variables of the same shapes and types,
    in the same order. `process_set`: the ranks that participate (default: all ranks).
    """
    if size() == 1:
        return
    for number, bundle in enumerate(_bundles(variables)):
        arrays = [to_array(variable) for variable in bundle]
        data = np.concatenate([_bytes_of(each) for each in arrays])
        tensor = torch.from_numpy(data)
        name = f"keras.variables.{number}"
        perform(broadcasting(tensor, tensor, root_rank, name, process_set))
        if rank() != root_rank:
            _assign(bundle, arrays, data)


def _assign(
    variables: Sequence[Any],
    arrays: "Sequence[np.ndarray[Any, Any]]",
    data: "np.ndarray[Any, Any]",
) -> None:
    """Write the received bytes into the arrays, and those into the variables."""
    start = 0
    for variable, array in zip(variables, arrays, strict=True):
        _bytes_of(array)[:] = data[start : start + array.nbytes]
        start += array.nbytes
        variable.assign(array)


def _bytes_of(array: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    """Return the bytes of a contiguous array, as a view."""
    return array.reshape(-1).view(np.uint8)


def _bundles(variables: Sequence[Any]) -> Iterator[list[Any]]:
    """Split the variables into lists of a limited size, with at least one variable each."""
    bundle: list[Any] = []
    nbytes = 0
    for variable in variables:
        # An upper limit: no Keras type has more bytes per element.
        more = 8 * int(np.prod(variable.shape))
        if bundle and nbytes + more > _BUNDLE_NBYTES:
            yield bundle
            bundle, nbytes = [], 0
        bundle.append(variable)
        nbytes += more
    if bundle:
        yield bundle
