"""From an operation on TensorFlow's tensors to the engine, in the three modes of TensorFlow.

| mode | how |
|---|---|
| eager | the engine is called directly |
| tf.function | one py_function per operation; TensorFlow runs them one after the other, as traced |
| graph in a Session | the same, but TensorFlow runs independent ones at the same time: `sessions` |

**Names.** The ranks match operations by name. In a graph it is the name of the node, which is
unique there. In eager mode it is the given name, or the kind of the operation: the calls of one
thread never overlap, and calls of several threads get a number.
"""

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import tensorflow as tf
from torch import Tensor

from allstep.tensorflow.bridge import is_plain, to_tensorflow, to_views
from allstep.tensorflow.sessions import provide_threads
from allstep.tensorflow.tf_errors import eager_errors, graph_errors

F = TypeVar("F", bound=Callable[..., Any])

Work = Callable[[list[Tensor], str], Sequence[Tensor]]
"""Does an operation: from views of the inputs and the name to the results."""


def unconverted(function: F) -> F:
    """Decorate a function that users call in tf.function: AutoGraph leaves it as it is."""
    result: F = tf.autograph.experimental.do_not_convert(function)
    return result


def with_gradient(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function that returns its result and the function of its gradient."""
    result: Callable[..., Any] = tf.custom_gradient(function)
    return result


@dataclass(frozen=True)
class Spec:
    """The dtype and, as far as known, the static shape of a result."""

    dtype: Any
    shape: Any = None

    @classmethod
    def like(cls, tensor: Any) -> "Spec":
        """Return the spec of a result with the shape of `tensor`."""
        return cls(tensor.dtype, tensor.shape)


@dataclass(frozen=True)
class Called:
    """How an operation is named. `kind`: the prefix of names that are made up.

    `ignore_name_scope`: whether only the last part of the node's name counts.
    """

    kind: str
    name: str | None = None
    ignore_name_scope: bool = False


def run(work: Work, tensors: Sequence[Any], results: Sequence[Spec], called: Called) -> list[Any]:
    """Do an operation and return its results, as eager tensors or as tensors of the graph."""
    if tf.executing_eagerly():
        with _reserved(called) as name, eager_errors():
            return _converted(work, tensors, name, [False] * len(tensors))
    return _in_graph(work, tensors, results, called)


def _converted(work: Work, tensors: Sequence[Any], name: str, plain: Sequence[bool]) -> list[Any]:
    """Call `work` with views of eager tensors; return its results as eager tensors."""
    views = to_views(tensors, plain)
    given = {id(view): tensor for view, tensor in zip(views, tensors, strict=True)}
    # A view that comes back is not ours to hand over: its memory may be a variable's.
    return [
        given[id(result)] if id(result) in given else to_tensorflow(result)
        for result in work(views, name)
    ]


def _in_graph(
    work: Work, tensors: Sequence[Any], results: Sequence[Spec], called: Called
) -> list[Any]:
    provide_threads()
    name, plain = "", [is_plain(tensor) for tensor in tensors]

    def call(*values: Any) -> list[Any]:
        with graph_errors():
            return _converted(work, values, name, plain)

    outputs = tf.py_function(
        call, list(tensors), [spec.dtype for spec in results], name=_node_name(tensors, called)
    )
    name = name_of(outputs[0].op)
    if called.ignore_name_scope:
        name = name.rsplit("/", 1)[-1]
    for output, spec in zip(outputs, results, strict=True):
        if spec.shape is not None:
            output.set_shape(spec.shape)
    return list(outputs)


def name_of(node: Any) -> str:
    """Return a name that is unique in the graph that a Session runs.

    The branches of a tf.cond are graphs of their own, in which names begin again.
    """
    graph = outermost = node.graph
    while hasattr(outermost, "outer_graph"):
        outermost = outermost.outer_graph
    is_alone = outermost is graph or tf.compat.v1.executing_eagerly_outside_functions()
    name: str = node.name if is_alone else outermost.unique_name(node.name)
    return name


def _node_name(tensors: Sequence[Any], called: Called) -> str:
    if called.name:
        return _normalized(called.name)
    return f"{called.kind}_{_normalized(tensors[0].name)}" if tensors else called.kind


def _normalized(name: str) -> str:
    """Return a name with only the characters that a node may have."""
    return re.sub("[^a-zA-Z0-9_]", "_", name)


# Names in eager mode

_lock = threading.Lock()
_taken: set[str] = set()


@contextmanager
def _reserved(called: Called) -> Iterator[str]:
    """Yield the given name, or one for the kind that no other thread uses now."""
    if called.name:
        yield called.name
        return
    with _lock:
        name, number = called.kind, 0
        while name in _taken:
            number += 1
            name = f"{called.kind}_{number}"
        _taken.add(name)
    try:
        yield name
    finally:
        with _lock:
            _taken.discard(name)
