"""The position of this process as nodes of a graph, read each time the graph runs.

`hvd.size()` is a number: a graph would keep it after the world has changed. These do not.
"""

from collections.abc import Callable

import tensorflow as tf
import torch

from allstep.hvd import place
from allstep.hvd.process_sets import ProcessSet
from allstep.tensorflow.calls import Called, Spec, run, unconverted


@unconverted
def size_op(process_set_id: int = 0, name: str | None = None) -> object:
    """Return the number of ranks of a process set."""
    return _node(lambda: len(_members(process_set_id)), "HorovodSize", name)


@unconverted
def rank_op(name: str | None = None) -> object:
    """Return the number of this process among all processes."""
    return _node(place.rank, "HorovodRank", name)


@unconverted
def local_rank_op(name: str | None = None) -> object:
    """Return the number of this process among the processes of its host."""
    return _node(place.local_rank, "HorovodLocalRank", name)


@unconverted
def local_size_op(name: str | None = None) -> object:
    """Return the number of processes on this host."""
    return _node(place.local_size, "HorovodLocalSize", name)


@unconverted
def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> object:
    """Return 1 if this process is a member of the process set, else 0."""
    return _node(
        lambda: int(place.rank() in _members(process_set_id)), "HorovodProcessSetIncluded", name
    )


def _node(read: Callable[[], int], kind: str, name: str | None) -> object:
    (result,) = run(
        lambda _tensors, _name: [torch.tensor(read(), dtype=torch.int32)],
        [],
        [Spec(tf.int32, [])],
        Called(kind, name),
    )
    return result


def check_set(process_set: ProcessSet) -> None:
    """Raise ValueError before an operation if there is no such process set, as Horovod does.

    A graph may be built before hvd.init().
    """
    number = process_set.process_set_id
    if number is not None and (tf.executing_eagerly() or place.is_initialized()):
        _members(number)


def _members(process_set_id: int) -> tuple[int, ...]:
    known = place.running().process_sets
    if process_set_id not in known:
        raise ValueError(
            f"process set {process_set_id} does not exist, or has not been registered; there are"
            f" {sorted(known)}"
        )
    return tuple(known[process_set_id])
