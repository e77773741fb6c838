"""Shares of global batches and exact evaluation: N workers have the results of one.

The tests of training need no distributed optimizer: with plain SGD the mean of the weights after a
step of each rank is the step of the mean gradient.
"""

import random
from typing import Any

import numpy as np
import pytest

from support.keras_checks import on_one_rank
from support.keras_ranks import all_equal, on_backends, run_keras_checks
from support.ranks import Ranks

pytestmark = pytest.mark.usefixtures("peers")

BATCH, SEED = 10, 3


@on_backends
def test_exact(ranks: Ranks, backend: str) -> None:
    run_keras_checks(
        ranks,
        backend,
        check_shares,
        check_structures_and_weights,
        check_orders_of_epochs,
        check_training_is_that_of_one_worker,
        check_evaluation_is_that_of_one_worker,
        check_bad_input,
        num_ranks=3 if backend == "torch" else 2,
    )


def samples(number: int) -> tuple[Any, Any]:
    generator = np.random.default_rng(number)
    return generator.normal(size=(number, 4)), generator.integers(0, 3, number)


def classifier(**options: Any) -> Any:
    import keras

    keras.config.set_floatx("float64")
    decay = keras.regularizers.L2(0.01)
    layers = [
        keras.layers.Dense(5, activation="tanh", kernel_regularizer=decay),
        keras.layers.Dense(3, activation="softmax"),
    ]
    model = keras.Sequential([keras.Input((4,)), *layers])
    model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy", **options)
    return model


def same_model(**options: Any) -> Any:
    """Return a model with the same weights on all ranks."""
    import allstep.keras as hvd

    model = classifier(**options)
    hvd.broadcast_variables(model.weights, 0)
    return model


def check_shares() -> None:
    import allstep.keras as hvd
    from allstep.hvd.objects import allgather_object
    from allstep.hvd.place import rank, size

    for number in (40, 23, 21, 1):
        x, y = samples(number)
        data = hvd.batches(x, y, batch=BATCH, shuffle=False)
        assert len(data) == data.num_batches == -(-number // BATCH)
        for index in range(len(data)):
            whole = y[index * BATCH : (index + 1) * BATCH]
            shares = allgather_object(data[index][1:])
            full = [(labels, weights) for labels, weights in shares if weights[0]]
            np.testing.assert_array_equal(np.concatenate([each[0] for each in full]), whole)
            for labels, weights in full:
                np.testing.assert_allclose(weights, len(labels) * size() / len(whole), rtol=1e-6)
            # An empty share is one sample with weight 0.
            assert all(len(labels) == len(weights) for labels, weights in shares)
            assert len(full) == min(size(), len(whole))
            assert max(len(each[0]) for each in full) - min(len(each[0]) for each in full) <= 1
            if rank() >= len(whole):
                assert data[index][2].tolist() == [0.0]


def check_structures_and_weights() -> None:
    import allstep.keras as hvd
    from allstep.hvd.place import size

    x, y = samples(size() * 4)
    data = hvd.batches(
        {"a": x, "b": [x, y]}, y, batch=size() * 4, sample_weight=np.arange(size() * 4)
    )
    inputs, targets, weights = data[0]
    assert isinstance(inputs["b"], tuple) and len(inputs["b"]) == 2
    for row, label, weight in zip(inputs["a"], targets, weights, strict=True):
        assert np.array_equal(x[int(weight)], row) and y[int(weight)] == label
    assert hvd.batches(x)[0][1] is None


def check_orders_of_epochs() -> None:
    import keras

    import allstep.keras as hvd
    from allstep.hvd.objects import allgather_object

    x, y = samples(23)
    numbers = np.arange(23.0)
    seen: list[list[float]] = []

    class Spy(hvd.Batches):
        def __getitem__(self, index: int) -> Any:
            seen[-1].extend(self._samples(index).tolist())
            return super().__getitem__(index)

        def on_epoch_begin(self) -> None:
            seen.append([])
            super().on_epoch_begin()

    seen.append([])
    data = Spy(x, y, BATCH, True, SEED)
    model = classifier()
    random.seed(5)
    expected_random = random.Random(5).random()
    # `shuffle` is True by default: Keras shuffles the batches as well.
    model.fit(data, epochs=2, verbose=0)
    assert random.random() == expected_random
    assert data.epoch == 2
    first, second = seen[-2:]
    assert sorted(first) == sorted(second) == numbers.tolist() and first != second
    assert all_equal([first, second])
    # A new object resumes at the third epoch.
    model.fit(data, epochs=1, verbose=0)
    third = list(seen[-1])
    # TensorFlow reads batches before an epoch.
    seen.append([])
    data = Spy(x, y, BATCH, True, SEED)
    data.epoch = 2
    model.fit(data, epochs=1, verbose=0)
    assert seen[-1] == third != first
    assert len({tuple(each) for each in allgather_object(third)}) == 1
    keras.backend.clear_session()


def check_training_is_that_of_one_worker() -> None:
    import keras

    import allstep.keras as hvd

    class AverageWeights(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            model = self.model
            model.set_weights([hvd.allreduce(each) for each in model.get_weights()])

    x, y = samples(31)
    model = same_model()
    first = model.get_weights()
    data = hvd.batches(x, y, batch=BATCH, seed=SEED)
    model.fit(data, epochs=2, shuffle=False, verbose=0, callbacks=[AverageWeights()])

    def train_alone() -> Any:
        alone = classifier()
        alone.set_weights(first)
        for epoch in range(2):
            order = np.random.default_rng([SEED, epoch]).permutation(31)
            for start in range(0, 31, BATCH):
                batch = order[start : start + BATCH]
                alone.train_on_batch(x[batch], y[batch])
        return alone.get_weights()

    weights = on_one_rank(hvd, train_alone)
    for mine, expected in zip(model.get_weights(), weights, strict=True):
        np.testing.assert_allclose(mine, expected, rtol=1e-10, atol=1e-12)


def check_evaluation_is_that_of_one_worker() -> None:
    import keras

    import allstep.keras as hvd

    def metrics() -> list[Any]:
        return [
            "accuracy",
            keras.metrics.SparseCategoricalCrossentropy(name="entropy"),
            keras.metrics.MeanIoU(3, sparse_y_pred=False),
        ]

    model = same_model(metrics=metrics(), weighted_metrics=["accuracy"])
    for number, weights in ((50, None), (7, np.arange(1.0, 8.0)), (1, None)):
        x, y = samples(number)
        expected = model.evaluate(x, y, sample_weight=weights, return_dict=True, verbose=0)
        found = hvd.evaluate(model, x, y, batch_size=50, sample_weight=weights, return_dict=True)
        assert found.keys() == expected.keys() and all_equal(list(found.values()))
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-10, err_msg=name)
    np.testing.assert_allclose(hvd.evaluate(model, x, y), model.evaluate(x, y, verbose=0))
    check_binary_metrics()


def check_binary_metrics() -> None:
    import keras

    import allstep.keras as hvd

    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, activation="sigmoid")])
    metrics = [
        keras.metrics.AUC(num_thresholds=20),
        keras.metrics.Precision(),
        keras.metrics.F1Score(average=None, threshold=0.5),
        keras.metrics.RootMeanSquaredError(),
        keras.metrics.TruePositives(),
        keras.metrics.R2Score(class_aggregation=None),
    ]
    model.compile("sgd", "binary_crossentropy", metrics=metrics)
    hvd.broadcast_variables(model.weights, 0)
    x, y = samples(17)
    targets = np.stack([y > 0, y > 1], 1).astype("float64")
    expected = model.evaluate(x, targets, return_dict=True, verbose=0)
    found = hvd.evaluate(model, x, targets, return_dict=True)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], np.asarray(value), rtol=1e-9, err_msg=name)


def check_bad_input() -> None:
    import keras

    import allstep.keras as hvd

    x, y = samples(8)
    with pytest.raises(ValueError, match=r"shapes \[8, 4\], \[7\]: expected the same number"):
        hvd.batches(x, y[:7])
    with pytest.raises(ValueError, match=r"batch=0"):
        hvd.batches(x, y, batch=0)
    with pytest.raises(ValueError, match="expected the same number"):
        hvd.evaluate(classifier(), x, y[:7])
    with pytest.raises(ValueError, match="Batches: expected arrays with all samples"):
        hvd.evaluate(classifier(), hvd.batches(x, y))

    class Least(keras.metrics.Metric):  # type: ignore[misc]
        def __init__(self, aggregation: str = "sum", start: str = "ones") -> None:
            super().__init__(name="least")
            self.least = self.add_variable((), start, aggregation=aggregation, name="least")
            self.start = start

        def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
            self.least.assign(keras.ops.minimum(self.least, keras.ops.min(y_pred)))

        def reset_state(self) -> None:
            self.least.assign(1.0 if self.start == "ones" else 0.0)

        def result(self) -> Any:
            return keras.ops.convert_to_tensor(self.least)

    with pytest.raises(ValueError, match=r"metric .*least starts at 1\.0, not at 0"):
        hvd.evaluate(same_model(metrics=[Least()]), x, y)
    with pytest.raises(ValueError, match=r"aggregation='only_first_replica'"):
        hvd.evaluate(same_model(metrics=[Least("only_first_replica", "zeros")]), x, y)
    hvd.evaluate(same_model(), x, y)
