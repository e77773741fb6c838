"""Broadcasts of whole values: variables, in eager mode and in graphs, and any object."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from torch import Tensor

from allstep import faults
from allstep.hvd import objects
from allstep.hvd.handles import perform_group
from allstep.hvd.process_sets import ProcessSet, global_process_set
from allstep.hvd.requests import broadcasting
from allstep.tensorflow.calls import Called, Spec, run, unconverted


@unconverted
def broadcast_(
    variables: Sequence[Any],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Give the root's values to the variables of all ranks, as one operation.

    Return the variables; in a graph, the tensors of the new values.
    """
    variables = list(variables)
    if not variables:
        return []
    _check_kinds(variables)
    values = _values_of_root(variables, root_rank, name, process_set)
    assigned = [_assign(each, value) for each, value in zip(variables, values, strict=True)]
    return variables if tf.executing_eagerly() else assigned


@unconverted
def broadcast_variables(
    variables: Sequence[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> Any:
    """Give the root's values to the variables of all ranks.

    In a graph, return the operation that does it. `inplace`: Horovod's choice of an operation; the
    result is the same.
    """
    variables = list(variables)
    if not variables:
        return None if tf.executing_eagerly() else tf.group()
    values = _values_of_root(variables, root_rank, None, process_set)
    assigned = [_assign(each, value) for each, value in zip(variables, values, strict=True)]
    return None if tf.executing_eagerly() else tf.group(*assigned)


@unconverted
def broadcast_global_variables(root_rank: int) -> Any:
    """Return the operation that gives the root's values to all global variables of the graph.

    Raise RuntimeError in eager mode, which has no global variables.
    """
    if tf.executing_eagerly():
        raise RuntimeError(
            "hvd.broadcast_global_variables() found eager mode, which has no global variables:"
            " use hvd.broadcast_variables(model.variables, root_rank=0), or"
            " tf.compat.v1.disable_eager_execution()"
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]
    """Gives the root's values to all global variables when a Session has been created.

    For MonitoredTrainingSession and Estimators. `device`: Horovod's argument; not used, since
    collectives work in the host's memory.
    """

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__()
        self.root_rank, self.device = root_rank, device
        self.bcast_op: Any = None

    def begin(self) -> None:
        """Add the operation to the graph."""
        if not self.bcast_op or self.bcast_op.graph is not tf.compat.v1.get_default_graph():
            self.bcast_op = broadcast_global_variables(self.root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Run the operation."""
        session.run(self.bcast_op)


@unconverted
def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the root's object on all ranks; the root gets its own object back.

    `session`: Horovod's argument; not used, since no graph is needed.
    """
    return objects.broadcast_object(obj, root_rank, name, process_set)


def broadcast_object_fn(
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[Any], Any]:
    """Return a function that broadcasts an object."""
    return lambda obj: broadcast_object(obj, root_rank, session, name, process_set)


@unconverted
def allgather_object(
    obj: Any,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Return a list of the objects `obj` of all ranks, by rank. They must be picklable."""
    return objects.allgather_object(obj, name, process_set)


# Variables


def _values_of_root(
    variables: Sequence[Any], root_rank: int, name: str | None, process_set: ProcessSet
) -> list[Any]:
    """Return the root's values of all variables. One collective."""

    def work(tensors: list[Tensor], name: str) -> Sequence[Tensor]:
        number = len(tensors)
        if faults.active is not None:
            faults.active.in_phase("broadcast")
        return perform_group(
            [
                broadcasting(each, None, root_rank, f"{name}_{index}of{number}", process_set)
                for index, each in enumerate(tensors, 1)
            ]
        )

    given = [_sendable(tf.convert_to_tensor(each)) for each in variables]
    # The name of a variable, since that of its value depends on the kind of variable.
    in_graph = None if tf.executing_eagerly() else f"HorovodBroadcast_{variables[0].name}"
    called = Called("HorovodBroadcastVariables", name or in_graph)
    values = run(work, given, [Spec.like(each) for each in given], called)
    return [
        _received(value, tf.as_dtype(each.dtype).base_dtype)
        for value, each in zip(values, variables, strict=True)
    ]


# torch has no arithmetic for these, and a random seed of Keras is one of them.
_UNSIGNED = {tf.uint32: tf.int32, tf.uint64: tf.int64}


def _sendable(value: Any) -> Any:
    same_bits = _UNSIGNED.get(value.dtype)
    return value if same_bits is None else tf.bitcast(value, same_bits)


def _received(value: Any, dtype: Any) -> Any:
    return tf.bitcast(value, dtype) if dtype in _UNSIGNED else value


def _assign(variable: Any, value: Any) -> Any:
    return variable.assign(value)


def _check_kinds(variables: Sequence[Any]) -> None:
    """Raise ValueError unless all are resource variables, or all are ref variables."""
    kinds = {hasattr(each, "handle") for each in variables}
    if len(kinds) > 1:
        raise ValueError(
            "broadcast_ of resource variables and ref variables in one list: call it once for each"
            " kind"
        )
