"""Checks of `hvd.batches` and `hvd.evaluate` with Keras 2, for any number of ranks.

The reference is a plain model in the same process that trains and evaluates with all samples.
"""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.keras_checks import assert_equal, on_one_rank
from support.keras_ranks import all_equal

BATCH, SEED = 10, 3


def samples(number: int) -> tuple[Any, Any]:
    generator = np.random.default_rng(number)
    return generator.normal(size=(number, 4)), generator.integers(0, 3, number)


def classifier(tf: Any, optimizer: Any, **options: Any) -> Any:
    tf.keras.utils.set_random_seed(5)
    dense, decay = tf.keras.layers.Dense, tf.keras.regularizers.L2(0.01)
    layers = [dense(5, "tanh", kernel_regularizer=decay, input_shape=(4,)), dense(3, "softmax")]
    made = tf.keras.Sequential(layers)
    made.compile(optimizer, "sparse_categorical_crossentropy", **options)
    return made


def batches_train_as_one_worker(hvd: Any, tf: Any, folder: Path) -> None:
    """Uneven shares, a last batch of one sample, and weights; `fit` shuffles if it may."""
    x, y = samples(31)
    weights = np.linspace(0.5, 2.0, 31)
    made = classifier(tf, hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.1, momentum=0.9)))
    data = hvd.batches(x, y, batch=BATCH, seed=SEED, sample_weight=weights)
    assert isinstance(data, tf.keras.utils.Sequence) and len(data) == 4
    random.seed(hvd.rank())
    made.fit(data, epochs=2, verbose=0)
    # Threads of Keras would read batches of the next epoch; a new object resumes.
    assert data.epoch == 2
    data = hvd.batches(x, y, batch=BATCH, seed=SEED, sample_weight=weights)
    data.epoch = 2
    made.fit(data, verbose=0, workers=3)
    assert data.epoch == 3

    def train_alone() -> Any:
        alone = classifier(tf, tf.keras.optimizers.SGD(0.1, momentum=0.9))
        for epoch in range(3):
            order = np.random.default_rng([SEED, epoch]).permutation(31)
            for start in range(0, 31, BATCH):
                taken = order[start : start + BATCH]
                alone.train_on_batch(x[taken], y[taken], weights[taken])
        return alone.get_weights()

    assert_equal(made.get_weights(), on_one_rank(hvd, train_alone))


def evaluates_as_one_worker(hvd: Any, tf: Any, folder: Path) -> None:
    metrics = tf.keras.metrics

    def several() -> list[Any]:
        return ["accuracy", metrics.SparseCategoricalCrossentropy(name="entropy")]

    made = classifier(
        tf, "sgd", metrics=[*several(), metrics.MeanIoU(3, sparse_y_pred=False)],
        weighted_metrics=several()[:1],
    )  # fmt: skip
    for number, weights in ((50, None), (7, np.arange(1.0, 8.0)), (1, None)):
        x, y = samples(number)
        expected = made.evaluate(x, y, sample_weight=weights, return_dict=True, verbose=0)
        found = hvd.evaluate(made, x, y, sample_weight=weights, return_dict=True)
        assert found.keys() == expected.keys() and all_equal(list(found.values()))
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-10, err_msg=name)
    np.testing.assert_allclose(hvd.evaluate(made, x, y), made.evaluate(x, y, verbose=0))
    plain = classifier(tf, "sgd")
    assert abs(hvd.evaluate(plain, x, y) - plain.evaluate(x, y, verbose=0)) < 1e-12
    _binary_metrics(hvd, tf)


def _binary_metrics(hvd: Any, tf: Any) -> None:
    metrics = tf.keras.metrics
    made = tf.keras.Sequential([tf.keras.layers.Dense(2, "sigmoid", input_shape=(4,))])
    sums = [metrics.AUC(num_thresholds=20), metrics.Precision()]
    found = [*sums, metrics.RootMeanSquaredError()]
    made.compile("sgd", "binary_crossentropy", metrics=[*found, metrics.TruePositives()])
    hvd.broadcast_variables(made.weights, 0)
    x, y = samples(17)
    targets = np.stack([y > 0, y > 1], 1).astype("float64")
    expected = made.evaluate(x, targets, return_dict=True, verbose=0)
    for name, value in hvd.evaluate(made, x, targets, return_dict=True).items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-9, err_msg=name)


def wrong_samples(hvd: Any, tf: Any, folder: Path) -> None:
    x, y = samples(8)
    made = classifier(tf, "sgd")
    with pytest.raises(ValueError, match=r"shapes \[8, 4\], \[7\]: expected the same number"):
        hvd.batches(x, y[:7])
    with pytest.raises(ValueError, match="Batches: expected arrays with all samples"):
        hvd.evaluate(made, hvd.batches(x, y))

    class Least(tf.keras.metrics.Metric):  # type: ignore[misc]
        def __init__(self, start: str, aggregation: Any) -> None:
            super().__init__(name="least")
            self.least = self.add_weight("least", initializer=start, aggregation=aggregation)

        def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
            self.least.assign(tf.minimum(self.least, tf.reduce_min(y_pred)))

        def reset_state(self) -> None:
            self.least.assign(1.0)

        def result(self) -> Any:
            return tf.convert_to_tensor(self.least)

    kinds = tf.VariableAggregation
    for aggregation, error in ((kinds.SUM, "starts at 1.0, not at 0"), (kinds.NONE, "'none'")):
        least = classifier(tf, "sgd", metrics=[Least("ones", aggregation)])
        with pytest.raises(ValueError, match=error):
            hvd.evaluate(least, x, y)
