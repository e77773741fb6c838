"""The three modes of TensorFlow: the same function of arrays, run eagerly, in tf.function, in a Session.

For functions that run in a rank: TensorFlow is imported when it is used, since a process that has
imported it cannot fork.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy

Function = Callable[..., Sequence[Any]]
Runner = Callable[..., list[Any]]


def modes() -> Iterator[tuple[str, Runner]]:
    """Each mode's name, and how it runs a function of tensors on arrays; results are arrays."""
    yield from (("eager", _eager), ("function", _function), ("session", _session))


def _eager(function: Function, *arrays: Any) -> list[Any]:
    import tensorflow as tf

    return [_array(result) for result in function(*[tf.constant(array) for array in arrays])]


def _function(function: Function, *arrays: Any) -> list[Any]:
    import tensorflow as tf

    traced = tf.function(function)
    return [_array(result) for result in traced(*[tf.constant(array) for array in arrays])]


def _session(function: Function, *arrays: Any) -> list[Any]:
    import tensorflow as tf

    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        results = function(*[tf.constant(array) for array in arrays])
        return [_array(result) for result in session.run(list(results))]


def _array(result: Any) -> Any:
    return numpy.asarray(result)


def with_gradient(function: Callable[[Any], Any], weights: Any) -> Function:
    """The function's result, and the gradient of sum(result * weights) with respect to its input."""
    import tensorflow as tf

    def both(x: Any) -> list[Any]:
        with tf.GradientTape() as tape:
            tape.watch(x)
            result = function(x)
            loss = tf.reduce_sum(result * tf.constant(weights, result.dtype))
        return [result, tape.gradient(loss, x)]

    return both
