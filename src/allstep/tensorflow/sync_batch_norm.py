"""SyncBatchNormalization: batch normalization with the statistics of the batches of all ranks.

The statistics are those of one worker with all samples, also if the ranks have different numbers of
samples: each rank sends the number, mean and variance of its own, in one collective, and combines
those of all ranks (Chan, Golub and LeVeque 1983)::

    N = sum n      M = sum n m / N      V = sum n (v + (m - M)^2) / N

Horovod averages the means and the mean squares of the ranks, whatever their numbers of samples.

The class is a subclass of BatchNormalization of the Keras that TensorFlow uses: Keras 3, or Keras 2
with TF_USE_LEGACY_KERAS=1. It is made at the first use, since Keras takes seconds to import.
"""

import functools
from typing import Any

import tensorflow as tf

from allstep.hvd.requests import Sum
from allstep.tensorflow.calls import unconverted
from allstep.tensorflow.mpi_ops import _allreduce
from allstep.tensorflow.place_ops import rank_op, size_op


@functools.cache
def sync_batch_normalization() -> type:
    """Return the class for the Keras that TensorFlow uses."""
    base: Any = tf.keras.layers.BatchNormalization
    is_keras_2 = base.__module__.startswith("tf_keras")
    backend = "tensorflow" if is_keras_2 else tf.keras.backend.backend()
    if backend != "tensorflow":
        raise ValueError(
            f"SyncBatchNormalization of allstep.tensorflow found Keras on {backend!r}: it needs"
            " KERAS_BACKEND=tensorflow"
        )
    mixin = _Keras2 if is_keras_2 else _Keras3
    return type("SyncBatchNormalization", (mixin, base), {"__doc__": mixin.__doc__})


def _check_fused(fused: Any) -> None:
    if fused is not False:
        raise ValueError(
            f"SyncBatchNormalization(fused={fused}): a fused kernel computes the statistics of one"
            " rank; leave fused out"
        )


class _Keras3:
    """Batch normalization with the exact statistics of all ranks."""

    _reduction_axes: Any

    def __init__(self, fused: bool = False, **kwargs: Any) -> None:
        _check_fused(fused)
        super().__init__(**kwargs)

    @unconverted
    def _moments(self, inputs: Any, mask: Any) -> Any:
        return _moments_of_all(inputs, self._reduction_axes, mask, keep_dims=False)


class _Keras2:
    """Batch normalization with the exact statistics of all ranks."""

    def __init__(self, fused: bool = False, **kwargs: Any) -> None:
        _check_fused(fused)
        super().__init__(fused=False, **kwargs)  # type: ignore[call-arg]

    @unconverted
    def _moments(self, inputs: Any, reduction_axes: Any, keep_dims: bool, mask: Any = None) -> Any:
        return _moments_of_all(inputs, reduction_axes, mask, keep_dims)


def _moments_of_all(inputs: Any, axes: Any, mask: Any, keep_dims: bool) -> Any:
    """Return mean and variance over the samples of all ranks. A collective."""
    values = tf.cast(inputs, tf.float64 if inputs.dtype == tf.float64 else tf.float32)
    number, mean, variance = _own_moments(values, list(axes), mask)
    gathered = _of_all_ranks(tf.stack([tf.stop_gradient(number), mean, variance]))
    numbers, means, variances = tf.unstack(gathered, axis=1)
    shares = tf.stop_gradient(tf.math.divide_no_nan(numbers, tf.reduce_sum(numbers, 0)))
    total_mean = tf.reduce_sum(shares * means, 0)
    total_variance = tf.reduce_sum(shares * (variances + (means - total_mean) ** 2), 0)
    if not keep_dims:
        total_mean, total_variance = tf.squeeze(total_mean, axes), tf.squeeze(total_variance, axes)
    return tf.cast(total_mean, inputs.dtype), tf.cast(total_variance, inputs.dtype)


def _own_moments(values: Any, axes: list[int], mask: Any) -> tuple[Any, Any, Any]:
    """Return number, mean and variance of this rank's samples; zero where there are none."""
    ones = tf.ones_like(values)
    counted = ones if mask is None else ones * tf.cast(tf.expand_dims(mask, -1), values.dtype)
    number = tf.reduce_sum(counted, axes, keepdims=True)
    mean = tf.math.divide_no_nan(tf.reduce_sum(values * counted, axes, keepdims=True), number)
    squares = tf.reduce_sum((values - mean) ** 2 * counted, axes, keepdims=True)
    return number, mean, tf.math.divide_no_nan(squares, number)


def _of_all_ranks(stats: Any) -> Any:
    """Return the statistics of all ranks, stacked by rank.

    A sum of arrays with one's own row each: unlike an allgather's, its gradient is the sum over the
    ranks, which is what a loss that depends on all samples needs.
    """
    shape = tf.concat([[size_op()], tf.shape(stats)], 0)
    placed = tf.scatter_nd([[rank_op()]], stats[None], shape)
    result = _allreduce(placed, op=Sum)
    result.set_shape([None, *stats.shape])
    return result


def __getattr__(name: str) -> Any:
    if name == "SyncBatchNormalization":
        return sync_batch_normalization()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
