"""Python objects between ranks, and the values of a model's parameters."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from allstep import faults
from allstep.hvd import objects
from allstep.hvd.handles import enqueue, synchronize
from allstep.hvd.process_sets import global_process_set
from allstep.hvd.requests import broadcasting
from allstep.mxnet.framework import mx
from allstep.mxnet.mxnet_errors import InvalidArgument, mxnets_errors
from allstep.mxnet.ndarray_views import write_view

__all__ = ["allgather_object", "broadcast_object", "broadcast_parameters"]


def broadcast_object(obj: Any, root_rank: int = 0, name: str | None = None) -> Any:
    """Return the root's object on all ranks. It must be picklable.

    `obj` is ignored on other ranks than `root_rank`.
    """
    with mxnets_errors():
        return objects.broadcast_object(obj, root_rank, name)


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Return a list of the objects `obj` of all ranks, by rank. They must be picklable."""
    with mxnets_errors():
        return objects.allgather_object(obj, name)


def broadcast_parameters(params: Any, root_rank: int = 0, prefix: str | None = None) -> None:
    """Copy the root's values to all ranks, in place.

    - `params`: a dict of NDArrays or Parameters, such as the parts of `Module.get_params()`, or the
      ParameterDict of `Block.collect_params()`. A parameter whose initialization is deferred (its
      shape is known at the first forward pass) is broadcast when it is initialized.
    - `root_rank`: the rank whose values are sent. Default: 0.
    - `prefix`: put before the names by which the ranks match the parameters. Needed for a second
      model with the same names. Default: none.
    """
    if not isinstance(params, (Mapping, mx.gluon.ParameterDict)):
        raise InvalidArgument(
            f"invalid params of type {type(params).__name__}: give a dict of NDArrays, or"
            " model.collect_params()"
        )
    with mxnets_errors():
        _broadcast_all(_named(params, prefix), root_rank)


def _named(params: Any, prefix: str | None) -> list[tuple[str, Any]]:
    """Return the parameters under the names that they have on all ranks."""
    if prefix is not None and not isinstance(prefix, str):
        raise InvalidArgument(f"prefix={prefix!r}: expected a string")
    return [(f"{prefix or ''}{name}", params[name]) for name in sorted(params.keys())]


def _broadcast_all(named: list[tuple[str, Any]], root_rank: int) -> None:
    """Broadcast the parameters that have values; let the others follow."""
    views = [view for name, each in named if not _is_deferred(each) for view in _views(name, each)]
    for name, each in named:
        if _is_deferred(each):
            _broadcast_when_initialized(each, root_rank, name)
    _broadcast_views(views, root_rank)


def _broadcast_views(views: list[tuple[str, Tensor]], root_rank: int) -> None:
    """Start all broadcasts, then wait for them: their order may differ between ranks."""
    if faults.active is not None:
        faults.active.in_phase("broadcast")
    started = [
        enqueue(broadcasting(view, view, root_rank, name, global_process_set))
        for name, view in views
    ]
    for handle in started:
        synchronize(handle)


def _is_deferred(each: Any) -> bool:
    return isinstance(each, mx.gluon.Parameter) and bool(each._deferred_init)


def _views(name: str, each: Any) -> list[tuple[str, Tensor]]:
    """Return views of the arrays of a parameter, one for each of its devices, with their names."""
    arrays = each.list_data() if isinstance(each, mx.gluon.Parameter) else [each]
    return [
        (name if number == 0 else f"{name}.{number}", write_view(array))
        for number, array in enumerate(arrays)
    ]


def _broadcast_when_initialized(parameter: Any, root_rank: int, name: str) -> None:
    """Broadcast a parameter right after its deferred initialization, once."""
    initialize: Callable[..., None] = type(parameter)._init_impl

    def init_and_broadcast(*args: Any, **kwargs: Any) -> None:
        del parameter._init_impl
        initialize(parameter, *args, **kwargs)
        with mxnets_errors():
            _broadcast_views(_views(name, parameter), root_rank)

    parameter._init_impl = init_and_broadcast
