"""Horovod's callbacks for Keras, and what the ranks compare before the first step, on two ranks."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.keras_ranks import all_equal, on_backends, run_keras_checks
from support.ranks import Ranks

pytestmark = pytest.mark.usefixtures("peers")

X = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
Y = np.arange(32) % 3


@on_backends
def test_callbacks(ranks: Ranks, backend: str) -> None:
    run_keras_checks(
        ranks,
        backend,
        check_broadcast_before_the_first_step,
        check_broadcast_without_input,
        check_local_variables,
        check_values,
        check_metric_average,
        check_schedule_takes_effect_per_batch,
        check_schedule_of_a_number,
        check_momentum_correction,
        check_warmup,
        check_arguments,
        check_differences_raise_on_all_ranks,
        check_warning_without_distributed_optimizer,
        check_xla_is_switched_off,
        check_best_model_checkpoint,
        check_no_method_for_the_end_of_a_batch,
    )


def classifier(
    units: int = 5, with_input: bool = True, optimizer: Any = None, **options: Any
) -> Any:
    import keras

    layers = [keras.layers.Dense(units, activation="tanh"), keras.layers.Dense(3)]
    model = keras.Sequential([keras.Input((4,)), *layers] if with_input else layers)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer or keras.optimizers.SGD(0.1, momentum=0.9), loss, **options)
    return model


def fit(model: Any, callbacks: list[Any], **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is not distributed")
        options = {"batch_size": 8, "epochs": 1, "verbose": 0, **options}
        return model.fit(X, Y, callbacks=callbacks, **options)


def recorder(method: str, record: Callable[[Any], Any]) -> Any:
    """Return a callback that appends `record(model)` to its `found` in one of Keras's methods."""
    import keras

    class Recorder(keras.callbacks.Callback):  # type: ignore[misc]
        found: list[Any]

    def called(self: Any, *_: Any, **__: Any) -> None:
        self.found.append(record(self.model))

    setattr(Recorder, method, called)
    made = Recorder()
    made.found = []
    return made


def variables_of(model: Any) -> list[Any]:
    import keras

    variables = [*model.weights, *model.optimizer.variables]
    return [np.array(keras.ops.convert_to_numpy(each)) for each in variables]


def check_broadcast_before_the_first_step() -> None:
    import allstep.keras as hvd
    from allstep.hvd.place import rank

    model = classifier()
    if rank() == 1:
        # A trained optimizer on the root: its momentum is sent to the rank that has none yet.
        fit(model, [])
    mine = variables_of(model)
    before = recorder("on_train_begin", variables_of)
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(1)
    fit(model, [callback, before])
    assert all_equal(before.found[0])
    if rank() == 1:
        assert all(np.array_equal(a, b) for a, b in zip(mine, before.found[0], strict=True))
        assert any(np.any(each) for each in mine[6:])
    # Once per object: the second training begins with each rank's own weights.
    assert not all_equal(model.get_weights())
    fit(model, [callback, before])
    assert not all_equal(before.found[1])
    assert hvd.BroadcastGlobalVariablesCallback is hvd.callbacks.BroadcastGlobalVariablesCallback


def check_broadcast_without_input() -> None:
    import keras

    import allstep.keras as hvd

    model = classifier(with_input=False)
    found = recorder("on_train_batch_begin", variables_of)
    fit(model, [hvd.callbacks.BroadcastGlobalVariablesCallback(0), found])
    # TensorFlow has no weights before the first batch, so they are sent at its end.
    first = 1 if keras.backend.backend() == "tensorflow" else 0
    assert all_equal(found.found[first]) and len(found.found[first]) > 8
    assert first == 0 or len(found.found[0]) < 3


def check_local_variables() -> None:
    import allstep.keras as hvd
    from allstep.hvd.place import rank

    model = classifier()
    kernel, bias = model.layers[0].variables
    bias.assign(bias + rank())
    for given, later in (([kernel, bias], []), (kernel, [bias])):
        before = recorder("on_train_begin", variables_of)
        callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=given)
        for each in later:
            callback.register_local_var(each)
        fit(model, [callback, before])
        weights = before.found[0]
        assert not all_equal(weights[:1]) and not all_equal(weights[1:2])
        assert all_equal(weights[2:]) and len(weights) == 10


def check_values() -> None:
    import keras
    import ml_dtypes

    import allstep.keras as hvd
    from allstep.hvd.place import rank
    from allstep.hvd.requests import Max, Sum
    from allstep.torch.compression import Compression

    me = rank()
    assert hvd.allreduce(me + 1.0) == 1.5 and hvd.allreduce([me, 2], average=False).tolist() == [
        1,
        4,
    ]
    assert hvd.allreduce(me, op=Max) == 1 and hvd.allreduce(me, op=Sum, prescale_factor=2) == 2
    tensor = keras.ops.convert_to_tensor([1.0, 3.0])
    reduced = hvd.allreduce(tensor, compression=Compression.fp16, name="values")
    assert hvd.allreduce([1.0001], compression=Compression.fp16).tolist() == [1.0]
    assert keras.ops.is_tensor(reduced) and keras.ops.convert_to_numpy(reduced).tolist() == [1, 3]
    short = np.array([1, 2], ml_dtypes.bfloat16)
    assert hvd.allreduce(short).dtype == short.dtype and hvd.allreduce(short).tolist() == [1, 2]
    assert hvd.allgather(np.full((me + 1, 2), me)).tolist() == [[0, 0], [1, 1], [1, 1]]
    assert hvd.broadcast(np.array([me, 7]), 1).tolist() == [1, 7]
    assert hvd.reducescatter(np.arange(4.0)).tolist() == [[0, 1], [2, 3]][me]
    assert hvd.reducescatter(np.arange(4), op=Sum).tolist() == [[0, 2], [4, 6]][me]
    with pytest.raises(ValueError, match="op supersedes average"):
        hvd.allreduce(1.0, average=False, op=Max)
    with pytest.raises(RuntimeError, match=r"BroadcastGlobalVariablesCallback\(0\)"):
        hvd.broadcast_global_variables(0)
    types = ["float32", "float16", "bfloat16", "int8", "bool", "int64"]
    for shape in [(), (0, 2), (3,)]:
        variables = [
            keras.Variable(np.full(shape, me), dtype=each, trainable=False) for each in types
        ]
        hvd.broadcast_variables(variables, 1)
        for variable in variables:
            assert np.all(keras.ops.convert_to_numpy(variable).astype(int) == 1), variable


def check_metric_average() -> None:
    import allstep.keras as hvd
    from allstep.hvd.place import rank

    callback = hvd.callbacks.MetricAverageCallback()
    logs = {
        "loss": 1.0 + rank(),
        "accuracy": np.float32(rank()),
        "f1": np.array([0.0, rank()]),
        "name": "x",
    }
    callback.on_epoch_end(0, logs)
    assert logs["loss"] == 1.5 and logs["accuracy"] == 0.5 and logs["f1"].tolist() == [0, 0.5]
    assert logs["name"] == "x"
    callback.on_epoch_end(1, None)
    with pytest.raises(ValueError, match="rank 0 has the metrics loss, val_loss, rank 1 loss"):
        callback.on_epoch_end(2, {"loss": 1.0, **({} if rank() else {"val_loss": 1.0})})
    history = fit(
        classifier(), [callback], validation_data=(X[: 8 + rank()], Y[: 8 + rank()])
    ).history
    assert sorted(history) == ["loss", "val_loss"] and all_equal(list(history.values()))


def line(momentum: float = 0.0) -> Any:
    """Return a model whose loss has gradient 1 with respect to its only weight."""
    import keras

    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    model.compile(keras.optimizers.SGD(1.0, momentum=momentum), lambda y, p: keras.ops.mean(p - y))
    return model


def weights_by_batch(model: Any, callback: Any, epochs: int) -> tuple[Any, list[float]]:
    """Train 4 batches per epoch; return the history and the weight before each batch, and last."""
    before = recorder("on_train_batch_begin", lambda model: model.get_weights()[0].item())
    ones, zeros = np.ones((8, 1), "float32"), np.zeros((8, 1), "float32")
    made = model.fit(
        ones, zeros, batch_size=2, epochs=epochs, verbose=0, callbacks=[before, callback]
    )
    return made.history, [*before.found, model.get_weights()[0].item()]


def check_schedule_takes_effect_per_batch() -> None:
    import allstep.keras as hvd

    callback = hvd.callbacks.LearningRateScheduleCallback(
        0.5, lambda epoch: 1 + epoch, start_epoch=1, end_epoch=3, staircase=False
    )
    history, weights = weights_by_batch(line(), callback, epochs=4)
    rates = [1.0] * 4 + [0.5 * (2 + i / 4) for i in range(8)] + [0.5 * 3.75] * 4
    np.testing.assert_allclose(-np.diff(weights), rates, rtol=1e-5)
    np.testing.assert_allclose(history["lr"], rates[3::4], rtol=1e-6)


def check_schedule_of_a_number() -> None:
    import allstep.keras as hvd

    callback = hvd.callbacks.LearningRateScheduleCallback(0.8, 0.5, start_epoch=1, staircase=False)
    history, weights = weights_by_batch(line(), callback, epochs=3)
    rates = [1.0] * 4 + [0.8] * 4 + [0.4] * 4
    np.testing.assert_allclose(-np.diff(weights), rates, rtol=1e-5)
    np.testing.assert_allclose(history["lr"], [1.0, 0.8, 0.4], rtol=1e-6)


def check_momentum_correction() -> None:
    import allstep.keras as hvd

    for correction in (True, False):
        callback = hvd.callbacks.LearningRateScheduleCallback(
            1.0, lambda epoch: 1 + epoch, staircase=False, momentum_correction=correction
        )
        _, weights = weights_by_batch(line(momentum=0.5), callback, epochs=2)
        velocity, old, expected = 0.0, 1.0, [weights[0]]
        for step in range(8):
            new = 1 + step / 4
            # Horovod's way: the momentum of this one batch is multiplied.
            momentum = 0.5 * (new / old if correction else 1)
            velocity, old = momentum * velocity - new, new
            expected.append(expected[-1] + velocity)
        np.testing.assert_allclose(weights, expected, rtol=1e-5)


def check_warmup() -> None:
    import contextlib
    import io

    import allstep.keras as hvd
    from allstep.hvd.place import rank

    callback = hvd.callbacks.LearningRateWarmupCallback(2.0, warmup_epochs=2, verbose=1)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        history, weights = weights_by_batch(line(), callback, epochs=3)
    rates = [2.0 / 2 * ((batch + 1) / 4 / 2 + 1) for batch in range(8)] + [2.0] * 4
    np.testing.assert_allclose(-np.diff(weights), rates, rtol=1e-5)
    np.testing.assert_allclose(history["lr"], [1.5, 2.0, 2.0], rtol=1e-6)
    text = "Epoch 2: finished gradual learning rate warmup to 2."
    assert printed.getvalue().strip() == (text if rank() == 0 else "")


def check_arguments() -> None:
    import allstep.keras as hvd

    none: Any = None
    with pytest.raises(ValueError, match="initial_lr=None"):
        hvd.callbacks.LearningRateScheduleCallback(none, 1.0)
    with pytest.raises(ValueError, match="float is not a Keras variable"):
        hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=[1.0])
    callback = hvd.callbacks.LearningRateWarmupCallback(0.1)
    callback.set_params({"steps": None, "verbose": 0})
    with pytest.raises(ValueError, match=r"give it as steps_per_epoch"):
        callback.on_train_begin()
    callback.set_params({"samples": 10, "batch_size": 3})
    callback.on_train_begin()
    assert callback.steps_per_epoch == 3


def check_differences_raise_on_all_ranks() -> None:
    import keras

    import allstep.keras as hvd
    from allstep.hvd.place import rank

    one = rank() == 1
    broadcast, average = (
        hvd.callbacks.BroadcastGlobalVariablesCallback,
        hvd.callbacks.MetricAverageCallback,
    )
    with pytest.raises(ValueError, match=r"rank 0 trains 4 steps per epoch, rank 1 2;"):
        fit(classifier(), [broadcast(0)], batch_size=16 if one else 8)
    with pytest.raises(
        ValueError, match=r"weight 0 of rank 0 is .*kernel \[4, 5\], that of rank 1 is .*\[4, 6\]"
    ):
        fit(classifier(6 if one else 5), [average()])
    with pytest.raises(ValueError, match="optimizer of rank 0 is SGD, that of rank 1 is Adam"):
        fit(classifier(optimizer=keras.optimizers.Adam() if one else None), [average()])
    with pytest.raises(
        ValueError,
        match=r"rank 0 has the callbacks MetricAverageCallback, rank 1 has Broadcast.*, MetricAverage",
    ):
        fit(classifier(), [broadcast(0), average()] if one else [average()])
    # Other layers that only one rank made do not matter.
    if one:
        classifier()
    fit(classifier(), [broadcast(0), average()])


def check_warning_without_distributed_optimizer() -> None:
    import keras

    import allstep.keras as hvd
    from allstep.hvd.place import rank

    class Marked(keras.optimizers.Adam):  # type: ignore[misc]
        __module__ = "horovod._keras"

    for optimizer, expected in ((keras.optimizers.Adam(), rank() == 0), (Marked(), False)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = classifier(optimizer=optimizer)
            model.fit(X, Y, verbose=0, callbacks=[hvd.callbacks.MetricAverageCallback()])
        found = [str(each.message) for each in caught if "is not distributed" in str(each.message)]
        assert len(found) == expected, found
        assert all("2 workers train, but the optimizer Adam" in each for each in found)


def check_xla_is_switched_off() -> None:
    import keras

    import allstep.keras as hvd

    class Marked(keras.optimizers.Adam):  # type: ignore[misc]
        __module__ = "horovod._keras"

    if keras.backend.backend() == "torch":
        return
    is_jax = keras.backend.backend() == "jax"
    for optimizer, expected in ((Marked(), is_jax), (keras.optimizers.Adam(), True)):
        model = classifier(optimizer=optimizer, jit_compile=True)
        # What `fit` does before it makes its train function.
        keras.callbacks.CallbackList([hvd.callbacks.LearningRateWarmupCallback(0.1)], model=model)
        assert model.jit_compile is expected


def check_best_model_checkpoint() -> None:
    import keras

    import allstep.keras as hvd
    from allstep.hvd.place import rank

    assert hvd.callbacks.BestModelCheckpoint("loss", 0, True).save_weights_only
    mode: Any = "min"
    with pytest.raises(ValueError, match=r"save_weights_only='min': .* write mode='min'"):
        hvd.callbacks.BestModelCheckpoint("loss", 0, mode)
    checkpoint = hvd.callbacks.BestModelCheckpoint(monitor="loss")
    assert checkpoint.filepath is None and checkpoint.save_best_only
    with pytest.raises(ValueError, match=r"checkpoint\.filepath = "):
        fit(classifier(), [checkpoint])
    model = classifier()
    if rank() == 0:
        checkpoint.filepath = str(Path("best.keras").absolute())
    callbacks = [hvd.callbacks.MetricAverageCallback(), *([] if rank() else [checkpoint])]
    history = fit(model, callbacks, epochs=2).history
    if rank() == 0:
        assert checkpoint.best == min(history["loss"])
        assert keras.saving.load_model(checkpoint.filepath).count_params() == model.count_params()


def check_no_method_for_the_end_of_a_batch() -> None:
    """Keras may then call callbacks while the next step runs."""
    import keras

    import allstep.keras as hvd

    names = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(0.1),
    ]
    made = keras.callbacks.CallbackList(names)
    assert made._async_train == (keras.backend.backend() != "tensorflow")
