"""Checks of Keras 2 under the mixed_float16 policy, for `keras2_checks`: `fit` with our callbacks.

`compile` then puts a LossScaleOptimizer around the optimizer. The reference is the plain optimizer
with whole batches, in the same process and under the same policy.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support import keras_cases as cases
from support.keras_ranks import all_equal


@contextmanager
def mixed_float16(tf: Any) -> Iterator[None]:
    """Set the policy in the block."""
    before = tf.keras.mixed_precision.global_policy()
    tf.keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        yield
    finally:
        tf.keras.mixed_precision.set_global_policy(before)


def mixed_precision_with_callbacks(hvd: Any, tf: Any, folder: Path) -> None:
    """No warning, XLA off, and the weights of one worker, with new and legacy optimizers."""
    from support.keras2_checks import assert_equal, kinds

    with mixed_float16(tf):
        for known in kinds(tf):
            alone, _ = _trained(tf, known.SGD(0.05, momentum=0.9), 0, 1, [])
            callbacks = [
                hvd.callbacks.BroadcastGlobalVariablesCallback(0),
                hvd.callbacks.MetricAverageCallback(),
                hvd.callbacks.LearningRateScheduleCallback(0.05, 1.0),
            ]
            optimizer = hvd.DistributedOptimizer(known.SGD(0.05, momentum=0.9))
            made, texts = _trained(tf, optimizer, hvd.rank(), hvd.size(), callbacks)
            assert made.optimizer is not optimizer and made.optimizer.inner_optimizer is optimizer
            assert not [text for text in texts if "distributed" in text], texts
            assert not made.jit_compile
            assert all_equal(made.get_weights())
            assert int(made.optimizer.iterations) == int(alone.optimizer.iterations) > 0
            assert_equal(made.get_weights(), alone.get_weights(), 2e-3)
        # One that is not distributed is named without what Keras has put around it.
        callback = hvd.callbacks.MetricAverageCallback()
        _, texts = _trained(tf, known.SGD(0.05), hvd.rank(), hvd.size(), [callback])
        found = [text for text in texts if "is not distributed" in text]
        assert len(found) == (hvd.rank() == 0)
        assert all("write hvd.DistributedOptimizer(SGD(...))" in text for text in found), found


def _trained(
    tf: Any, optimizer: Any, rank: int, size: int, callbacks: list[Any]
) -> tuple[Any, list[str]]:
    """Return a model trained on this rank's share, and the texts of the warnings."""
    from support.keras2_checks import model

    made = model(tf)
    made.compile(optimizer, "mse")
    # As if the script had switched it on after `compile`; one worker compiles nothing here.
    made.jit_compile = size > 1 and bool(callbacks) and hasattr(optimizer, "_settings")
    x, y = (cases.share(each, rank, size) for each in cases.data())
    options = {"batch_size": cases.BATCH // size, "epochs": 2, "shuffle": False, "verbose": 0}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made.fit(x, y, callbacks=callbacks, **options)
    return made, [str(each.message) for each in caught]
