"""Checks of `allstep.keras2`, to be called on all ranks together, with new and legacy optimizers.

As in `keras_checks`: many checks share one start of ranks, and the reference is the plain optimizer
with whole batches, in the same process, in float64.
"""

import gc
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support import keras2_exact, keras2_mixed
from support import keras_cases as cases
from support.alone import world_of_one
from support.keras_checks import assert_equal, on_one_rank
from support.keras_surface import check_surface

EXACT = {
    each.__name__: each
    for each in (
        keras2_exact.batches_train_as_one_worker,
        keras2_exact.evaluates_as_one_worker,
        keras2_exact.wrong_samples,
    )
}
MIXED = {each.__name__: each for each in (keras2_mixed.mixed_precision_with_callbacks,)}


def run(checks: list[str], folder: Path) -> None:
    """Call the checks with these names, with `allstep.tensorflow.keras` and a folder."""
    import tensorflow as tf

    import allstep.tensorflow.keras as hvd

    tf.keras.backend.set_floatx("float64")
    hvd.init()
    for name in checks:
        started = time.monotonic()
        check = (EXACT | MIXED).get(name) or globals()[name]
        check(hvd, tf, folder)
        print(f"{name}: {time.monotonic() - started:.1f} s", flush=True)
    assert "keras" not in sys.modules, "Keras 3 was imported"
    hvd.shutdown()
    with world_of_one(hvd):
        one_worker(hvd, tf, folder)


def kinds(tf: Any) -> tuple[Any, Any]:
    """The modules of new and of legacy optimizers."""
    return tf.keras.optimizers, tf.keras.optimizers.legacy


def model(tf: Any, seed: int = 3) -> Any:
    tf.keras.utils.set_random_seed(seed)
    dense = tf.keras.layers.Dense
    return tf.keras.Sequential(
        [dense(7, activation="tanh", input_shape=(5,)), dense(16, activation="tanh"), dense(2)]
    )


def train(
    tf: Any, optimizer: Any, rank: int, size: int, batch: int = cases.BATCH, **options: Any
) -> tuple[Any, Any]:
    """Train on this rank's share; return the losses of the epochs and the weights."""
    made = model(tf)
    made.compile(optimizer=optimizer, loss="mse", experimental_run_tf_function=False)
    x, y = (cases.share(each, rank, size) for each in cases.data())
    found = made.fit(
        x, y, batch_size=batch // size, epochs=cases.EPOCHS, shuffle=False, verbose=0, **options
    )
    return found.history["loss"], made.get_weights()


def mean_over_ranks(hvd: Any, values: list[float]) -> Any:
    return hvd.allreduce(np.array(values))


# One worker and several


def workers_match_one(hvd: Any, tf: Any, folder: Path) -> None:
    makes: list[Callable[[], Any]] = [
        lambda: tf.keras.optimizers.SGD(0.05, momentum=0.9),
        lambda: tf.keras.optimizers.AdamW(0.01, global_clipnorm=0.1, use_ema=True),
        lambda: tf.keras.optimizers.legacy.SGD(lr=0.05, momentum=0.9, clipnorm=0.1),
    ]
    for make in makes:
        losses, expected = on_one_rank(hvd, lambda make=make: train(tf, make(), 0, 1))
        mine, found = train(tf, hvd.DistributedOptimizer(make()), hvd.rank(), hvd.size())
        assert_equal(found, expected)
        assert_equal(mean_over_ranks(hvd, mine), losses)


def passes_and_compression(hvd: Any, tf: Any, folder: Path) -> None:
    for known in kinds(tf):
        variable = tf.Variable([0.0, 0.0])
        made = hvd.DistributedOptimizer(known.SGD(1.0), backward_passes_per_step=2)

        @tf.function
        def step(grad: Any, optimizer: Any = made, variable: Any = variable) -> None:
            optimizer.apply_gradients([(grad, variable)])

        step(tf.constant([hvd.rank() + 1.0, 1.0]))
        assert variable.numpy().tolist() == [0.0, 0.0] and made._agg_helper.counter == 1
        step(tf.constant([hvd.rank() + 1.0, 1.0]))
        assert variable.numpy().tolist() == [-3.0, -2.0] and made._agg_helper.counter == 0
        assert int(made.iterations) == 2
        small = hvd.DistributedOptimizer(known.SGD(1.0), compression=hvd.Compression.fp16)
        small.apply_gradients([(tf.constant([1.0001, 1.0]), variable)])
        assert variable.numpy().tolist() == [-4.0, -3.0]


def graph_matches_one(hvd: Any, tf: Any, folder: Path) -> None:
    """Keras 2 in a graph with a Session, as scripts for TensorFlow 1 have it; legacy optimizers."""
    with tf.Graph().as_default(), tf.compat.v1.Session().as_default():
        tf.compat.v1.keras.backend.set_session(tf.compat.v1.get_default_session())
        for passes in (1, 2):

            def make() -> Any:
                return tf.keras.optimizers.legacy.SGD(0.05, momentum=0.9, clipnorm=0.1)

            _, expected = train(tf, make(), 0, 1, batch=cases.BATCH * passes)
            made = hvd.DistributedOptimizer(
                make(), backward_passes_per_step=passes, average_aggregated_gradients=True
            )
            callbacks = [
                hvd.callbacks.BroadcastGlobalVariablesCallback(0),
                hvd.callbacks.MetricAverageCallback(),
            ]
            _, found = train(tf, made, hvd.rank(), hvd.size(), callbacks=callbacks)
            assert_equal(found, expected)
        _refused_in_a_graph(hvd, tf)
    tf.keras.backend.clear_session()


def _refused_in_a_graph(hvd: Any, tf: Any) -> None:
    x, y = cases.data()
    with pytest.raises(ValueError, match=r"hvd\.batches in a graph of tf\.compat\.v1"):
        hvd.batches(x, y)
    with pytest.raises(ValueError, match=r"hvd\.evaluate in a graph of tf\.compat\.v1"):
        hvd.evaluate(model(tf), x, y)
    # The error of a reduction keeps its class here, too.
    made = model(tf)
    optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.legacy.SGD(0.05))
    made.compile(optimizer, "mse")

    def fail(arrays: Any, name: Any) -> Any:
        raise hvd.HorovodInternalError("of this test")

    made.train_on_batch(x, y)
    optimizer._reduction._step = fail
    with pytest.raises(hvd.HorovodInternalError, match="of this test"):
        made.train_on_batch(x, y)


def one_worker(hvd: Any, tf: Any, folder: Path) -> None:
    """A world of one worker: the weights are those of the plain optimizer."""
    for known in kinds(tf):
        _, expected = train(tf, known.SGD(0.05, momentum=0.9), 0, 1)
        callbacks = [
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            hvd.callbacks.MetricAverageCallback(),
        ]
        made = hvd.DistributedOptimizer(known.SGD(0.05, momentum=0.9))
        _, found = train(tf, made, 0, 1, callbacks=callbacks)
        assert_equal(found, expected)
    gradient_may_be_a_variable(hvd, tf, folder)


# Applying gradients directly


def gradient_may_be_a_variable(hvd: Any, tf: Any, folder: Path) -> None:
    """The gradient of w*w/2 is w itself, in the same memory; eagerly and in a function."""
    for known in kinds(tf):
        variable = tf.Variable(np.arange(64.0))
        made = hvd.DistributedOptimizer(known.SGD(0.5, momentum=0.5))

        def step(made: Any = made, variable: Any = variable) -> None:
            made.apply_gradients([(tf.convert_to_tensor(variable), variable)])

        # The velocities are -w/2, then -w/2; w becomes w/2, then w/2 - w/4 - w/4.
        step()
        assert_equal([variable.numpy()], [np.arange(64.0) / 2])
        tf.function(step)()
        assert_equal([variable.numpy()], [np.zeros(64)])


def apply_reduces(hvd: Any, tf: Any, folder: Path) -> None:
    """A loop of one's own is reduced, unless it states that it has done so."""
    for known in kinds(tf):
        variable = tf.Variable([0.0])
        made = hvd.DistributedOptimizer(known.SGD(1.0))
        pairs = [(tf.constant([hvd.rank() + 1.0]), variable)]
        made.apply_gradients(pairs)
        made.minimize(lambda v=variable: v[0] * (hvd.rank() + 1.0), [variable])
        assert variable.numpy().tolist() == [-3.0]
        made.apply_gradients(pairs, experimental_aggregate_gradients=False)
        assert variable.numpy().tolist() == [-4.0 - hvd.rank()]
        made = hvd.DistributedOptimizer(known.SGD(1.0))
        rows = tf.IndexedSlices(tf.ones([1, 1]), tf.constant([hvd.rank()]), tf.constant([2, 1]))
        table = tf.Variable(tf.zeros([2, 1]))
        made.apply_gradients([(rows, table)])
        assert table.numpy().tolist() == [[-0.5], [-0.5]]


def rows_and_passes(hvd: Any, tf: Any, folder: Path) -> None:
    """IndexedSlices with several passes: an error, or their sum as dense gradients."""
    for known in kinds(tf):
        rows = tf.IndexedSlices(tf.ones([1, 1]), tf.constant([hvd.rank()]), tf.constant([2, 1]))
        table = tf.Variable(tf.zeros([2, 1]))
        made = hvd.DistributedOptimizer(known.SGD(1.0), backward_passes_per_step=2)
        with pytest.raises(ValueError, match=r"passes_per_step=2: give .* sparse_as_dense=True"):
            made.apply_gradients([(rows, table)])
        made = hvd.DistributedOptimizer(
            known.SGD(1.0), backward_passes_per_step=2, sparse_as_dense=True
        )
        for expected in ([[0.0], [0.0]], [[-1.0], [-1.0]]):
            made.apply_gradients([(rows, table)])
            assert table.numpy().tolist() == expected


def computed_gradients_are_reduced(hvd: Any, tf: Any, folder: Path) -> None:
    """What the optimizer's own method returns is reduced, and applied without a second sum."""
    for known, method in zip(kinds(tf), ("compute_gradients", "_compute_gradients"), strict=True):
        variable = tf.Variable([0.0])

        def loss(variable: Any = variable) -> Any:
            return variable[0] * (hvd.rank() + 1.0)

        made = hvd.DistributedOptimizer(known.SGD(1.0), op=hvd.Sum)
        pairs = getattr(made, method)(loss, [variable])
        assert pairs[0][0].numpy().tolist() == [3.0]
        made.apply_gradients(pairs)
        assert variable.numpy().tolist() == [-3.0]
        made = hvd.DistributedOptimizer(known.SGD(1.0), op=hvd.Sum, backward_passes_per_step=2)
        for how in ({}, {"experimental_aggregate_gradients": False}):
            tf.function(
                lambda how=how, made=made, name=method, loss=loss, variable=variable: (
                    made.apply_gradients(getattr(made, name)(loss, [variable]), **how)
                )
            )()
        assert variable.numpy().tolist() == [-9.0] and made._agg_helper.counter.numpy() == 0
        # A LossScaleOptimizer changes the gradients after this method, and reduces them then.
        scaled = tf.keras.mixed_precision.LossScaleOptimizer(
            hvd.DistributedOptimizer(known.SGD(1.0), op=hvd.Sum)
        )
        scaled.minimize(loss, [variable])
        assert variable.numpy().tolist() == [-12.0]


def ended_variables_are_forgotten(hvd: Any, tf: Any, folder: Path) -> None:
    """One optimizer for several models: a new variable may get the id of one that is gone."""
    for known in kinds(tf):
        made = hvd.DistributedOptimizer(known.SGD(1.0))
        for length in (1, 2, 3):
            gc.collect()
            variable = tf.Variable(np.zeros(length))
            made._reduced([(tf.constant(np.ones(length) * (hvd.rank() + 1)), variable)])
            assert len(made._reductions) == 1
            del variable


def local_variables_stay_local(hvd: Any, tf: Any, folder: Path) -> None:
    for known in kinds(tf):
        made = hvd.DistributedOptimizer(known.SGD(1.0))
        one, other = tf.Variable([0.0]), tf.Variable([0.0])
        made.register_local_var(other)
        made.apply_gradients([(tf.constant([hvd.rank() + 1.0]), each) for each in (one, other)])
        assert one.numpy().tolist() == [-1.5] and other.numpy().tolist() == [-(hvd.rank() + 1) / 2]
        layer = tf.keras.layers.Dense(2)
        made = hvd.PartialDistributedOptimizer(known.SGD(1.0), local_layers=layer)
        layer.build((None, 1))
        made.apply_gradients(
            [(tf.fill(each.shape, np.float64(hvd.rank())), each) for each in layer.weights]
        )
        assert layer.bias.numpy().tolist() == [-hvd.rank() / 2] * 2


def tape_is_reduced_once(hvd: Any, tf: Any, folder: Path) -> None:
    import allstep.tensorflow as hvd_tf

    for known in kinds(tf):
        made = hvd_tf.DistributedOptimizer(known.SGD(1.0), op=hvd.Sum)
        assert type(made).__module__ == "horovod._keras"
        check_tape(hvd_tf, tf, made, tf.Variable([0.0]), tf.Variable([0.0]))
        made = hvd.DistributedOptimizer(known.SGD(1.0), backward_passes_per_step=2)
        check_tape_with_passes(hvd_tf, tf, made, tf.Variable([0.0]))


def check_tape(hvd: Any, tf: Any, optimizer: Any, variable: Any, own: Any) -> None:
    """Gradients of our tape with Sum, eagerly and in a function; `own` is local for the tape."""

    def step() -> None:
        with tf.GradientTape() as tape:
            total = tf.convert_to_tensor(variable)[0] + tf.convert_to_tensor(own)[0]
            loss = total * (hvd.rank() + 1.0)
        tape = hvd.DistributedGradientTape(tape, op=hvd.Sum, scale_local_gradients=False)
        tape.register_local_source(own)
        grads = tape.gradient(loss, [_source(variable), _source(own)])
        optimizer.apply_gradients(zip(grads, [variable, own], strict=True))

    step()
    tf.function(step)()
    assert np.array(variable).tolist() == [-6.0]
    assert np.array(own).tolist() == [-2.0 * (hvd.rank() + 1)]
    # A gradient that was changed is another tensor: it is reduced.
    dtype = tf.convert_to_tensor(variable).dtype
    changed = tf.constant([1.0], dtype), tf.constant([0.0], dtype)
    optimizer.apply_gradients(list(zip(changed, [variable, own], strict=True)))
    assert np.array(variable).tolist() == [-8.0]


def check_tape_with_passes(hvd: Any, tf: Any, optimizer: Any, variable: Any) -> None:
    """Reduced gradients cannot be accumulated; `optimizer` has two passes per step."""
    with tf.GradientTape() as tape:
        loss = tf.convert_to_tensor(variable)[0] * 2.0
    grads = hvd.DistributedGradientTape(tape).gradient(loss, [_source(variable)])
    with pytest.raises(ValueError, match=r"backward_passes_per_step=2: the tape reduces in every"):
        optimizer.apply_gradients([(grads[0], variable)])


def _source(variable: Any) -> Any:
    """TensorFlow's own variable in a variable of Keras 3."""
    return variable.value if type(variable).__module__.startswith("keras") else variable


def infinities_are_skipped_together(hvd: Any, tf: Any, folder: Path) -> None:
    scaled = tf.keras.mixed_precision.LossScaleOptimizer
    for known in kinds(tf):
        made = scaled(hvd.DistributedOptimizer(known.SGD(1.0)))
        variable = tf.Variable([0.0])
        first = float(made.loss_scale)
        bad = np.inf if hvd.rank() else 1.0
        made.apply_gradients([(tf.constant([bad]), variable)])
        assert variable.numpy().tolist() == [0.0] and float(made.loss_scale) == first / 2
        made.apply_gradients([(tf.constant([1.0]), variable)])
        assert variable.numpy().tolist() == [-1.0]


# Callbacks


def begins_alike(hvd: Any, tf: Any, folder: Path) -> None:
    """Weights and slots are those of rank 0 before the first step; metrics are averaged."""
    callbacks = tf.keras.callbacks
    for known in kinds(tf):
        found = []
        made = model(tf, seed=hvd.rank())
        optimizer = hvd.DistributedOptimizer(known.SGD(0.1, momentum=0.9))
        made.compile(optimizer=optimizer, loss="mse", jit_compile=True)
        assert not made.jit_compile
        ours = [
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            hvd.callbacks.MetricAverageCallback(),
            hvd.callbacks.LearningRateWarmupCallback(0.1, warmup_epochs=2),
        ]
        assert all(isinstance(each, callbacks.Callback) for each in ours)
        # TensorFlow's variables cannot be compared with None.
        own = hvd.callbacks.BroadcastGlobalVariablesCallback(0, "", made.weights[0])
        own.register_local_var(made.weights[1])
        assert [id(each) for each in own.local_variables] == [id(each) for each in made.weights[:2]]
        see = callbacks.LambdaCallback(
            on_batch_begin=lambda batch, logs, m=made, f=found: f.append(m.get_weights())
        )
        x, y = (cases.share(each, hvd.rank(), 2) for each in cases.data())
        history = made.fit(x, y, 6, 2, verbose=0, callbacks=[*ours, see]).history
        from support.keras_ranks import all_equal

        assert all_equal(found[0]) and all_equal(made.get_weights())
        assert all_equal(history["loss"])
        assert abs(float(optimizer.learning_rate) - 0.1) < 1e-7
        check_momentum(hvd, tf, optimizer, made)


def differences_raise_on_all_ranks(hvd: Any, tf: Any, folder: Path) -> None:
    """Before the first step: steps, optimizers and weights that differ between the ranks."""
    is_other = hvd.rank() == 1

    def fit(made: Any, optimizer: Any, batch: int = 12) -> None:
        made.compile(hvd.DistributedOptimizer(optimizer), "mse")
        callbacks = [hvd.callbacks.MetricAverageCallback()]
        made.fit(*cases.data(), batch, verbose=0, callbacks=callbacks)

    for known in kinds(tf):
        with pytest.raises(ValueError, match=r"rank 0 trains 4 steps per epoch, rank 1 2;"):
            fit(model(tf), known.SGD(), 24 if is_other else 12)
        kind = known.Adam if is_other else known.SGD
        with pytest.raises(
            ValueError, match=r"of rank 0 is Distri.*\(SGD\).* rank 1 is .*\(Adam\)"
        ):
            fit(model(tf), kind())
        other = tf.keras.Sequential([tf.keras.layers.Dense(2, input_shape=(5,))])
        with pytest.raises(
            ValueError,
            match=r"weight 0 of rank 0 is .*kernel \[5, 7\], that of rank 1 is .*kernel \[5, 2\]",
        ):
            fit(other if is_other else model(tf), known.SGD())
        # Layers that only one rank made do not matter: Keras numbers the next ones there.
        if is_other:
            model(tf)
        fit(model(tf), known.SGD())


def check_momentum(hvd: Any, tf: Any, optimizer: Any, made: Any) -> None:
    from allstep.keras2.dialect import velocities

    before = [each.numpy() for each in velocities(optimizer)]
    assert len(before) == 6 and any(np.any(each) for each in before)
    schedule = hvd.callbacks.LearningRateScheduleCallback(0.1, 0.5, start_epoch=-1)
    schedule.set_model(made)
    schedule.set_params({})
    schedule.on_train_batch_begin(0)
    assert abs(float(optimizer.learning_rate) - 0.05) < 1e-7
    assert_equal([each.numpy() for each in velocities(optimizer)], [b / 2 for b in before], 1e-7)


def elastic_state(hvd: Any, tf: Any, folder: Path) -> None:
    from support.keras_ranks import all_equal

    made = model(tf, seed=hvd.rank())
    made.compile(hvd.DistributedOptimizer(tf.keras.optimizers.legacy.Adam(0.01)), "mse")
    state = hvd.elastic.KerasState(made, epoch=hvd.rank(), batch=0)
    begun = made.get_weights()
    x, y = (cases.share(each, hvd.rank(), 2) for each in cases.data())
    updates = [
        hvd.elastic.UpdateBatchStateCallback(state),
        hvd.elastic.UpdateEpochStateCallback(state),
    ]
    made.fit(x, y, 6, verbose=0, callbacks=updates)
    assert state.epoch == hvd.rank() + 1
    state.restore()
    assert_equal(made.get_weights(), begun, 0)
    state.sync()
    assert all_equal(made.get_weights()) and state.epoch == 0
    made.fit(x, y, 6, verbose=0, callbacks=[hvd.elastic.CommitStateCallback(state)])
    with pytest.raises(ValueError, match="has no weights"):
        hvd.elastic.KerasState(tf.keras.Sequential([tf.keras.layers.Dense(1)]))


def errors_before_a_fit_are_forgotten(hvd: Any, tf: Any, folder: Path) -> None:
    """An error that a loop of the script has caught does not replace one of `fit`."""
    made = model(tf)
    optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.1))
    made.compile(optimizer, "mse")
    x, y = cases.data()
    made.train_on_batch(x, y)
    with pytest.raises(IndexError):
        optimizer._reduction.step([])
    fails = tf.keras.callbacks.LambdaCallback(on_epoch_begin=lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        made.fit(x, y, verbose=0, callbacks=[fails])


# Saving


def saved_models_are_plain(hvd: Any, tf: Any, folder: Path) -> None:
    for name, known in zip(("new", "legacy"), kinds(tf), strict=True):
        made = model(tf)
        made.compile(hvd.DistributedOptimizer(known.Adam(0.02)), "mse")
        x, y = (cases.share(each, hvd.rank(), 2) for each in cases.data())
        made.fit(x, y, 6, verbose=0)
        path = folder / f"{name}-{hvd.rank()}.h5"
        made.save(path, save_format="h5")
        again = hvd.load_model(path)
        assert type(again.optimizer).__module__ == "horovod._keras"
        assert int(again.optimizer.iterations) == 4
        for each in (made, again):
            each.fit(x, y, 6, verbose=0, shuffle=False)
        assert_equal(again.get_weights(), made.get_weights())
        made.save(folder / f"{name}-{hvd.rank()}.keras")
        check_makers(hvd, tf, known, folder / f"own{hvd.rank()}.h5")
    best = hvd.callbacks.BestModelCheckpoint(monitor="loss")
    with pytest.raises(ValueError, match="has no file"):
        made.fit(x, y, 6, verbose=0, callbacks=[best])


def check_makers(hvd: Any, tf: Any, known: Any, path: Path) -> None:
    """A script's own function that makes distributed optimizers is used as it is."""

    class Own(known.Adam):  # type: ignore[misc]
        pass

    def make(**config: Any) -> Any:
        return hvd.DistributedOptimizer(Own(**config), op=hvd.Sum)

    made = model(tf)
    made.compile(make(learning_rate=0.02), "mse")
    made.fit(*cases.data(), verbose=0)
    made.save(path, save_format="h5")
    again = hvd.load_model(path, custom_objects={"Own": make})
    assert again.optimizer._settings.op == hvd.Sum
    assert int(again.optimizer.iterations) == int(made.optimizer.iterations) > 0


def wrong_arguments(hvd: Any, tf: Any, folder: Path) -> None:
    import allstep.tensorflow as hvd_tf

    for known in kinds(tf):
        plain = known.Adam(0.02, beta_1=0.8, clipnorm=1.0)
        made = hvd.DistributedOptimizer(plain)
        assert isinstance(made, known.Adam) and type(made).__name__ == "Adam"
        assert made.get_config() == plain.get_config()
        assert list(made.variables()) is not None
        with pytest.raises(ValueError, match="distributed optimizer already"):
            hvd.DistributedOptimizer(made)
        with pytest.raises(ValueError, match="wrap the inner optimizer"):
            hvd.DistributedOptimizer(tf.keras.mixed_precision.LossScaleOptimizer(known.SGD()))
        with pytest.raises(ValueError, match=r"use hvd\.Average or hvd\.Sum"):
            hvd.DistributedOptimizer(known.SGD(0.1), op=hvd.Adasum)
        with pytest.raises(ValueError, match="expected layers"):
            hvd.PartialDistributedOptimizer(known.SGD(1.0), local_layers=["dense"])
    with pytest.raises(RuntimeError, match="eager mode"):
        hvd.broadcast_global_variables(0)
    assert hvd.allgather([hvd.rank()]).tolist() == [0, 1]
    assert float(hvd.broadcast(hvd.rank(), 1)) == 1
    assert hvd.reducescatter([1.0, 2.0], op=hvd.Sum).tolist() == [2.0 * (hvd.rank() + 1)]
    for compression in (hvd.Compression, hvd_tf.Compression):
        assert hvd.allreduce([1.0001], compression=compression.fp16).tolist() == [1.0]


def names_and_signatures(hvd: Any, tf: Any, folder: Path) -> None:
    check_surface(hvd, average="None")


# A graph of tf.compat.v1


def graph_mode() -> None:
    """Several passes, an elastic state and gradients in a Session, with legacy optimizers."""
    import tensorflow as tf

    import allstep.tensorflow.keras as hvd

    tf.compat.v1.disable_eager_execution()
    tf.keras.backend.set_floatx("float64")
    hvd.init()
    x, y = (each[:8] for each in cases.data())
    options = {"epochs": 3, "shuffle": False, "verbose": 0}

    def trained(make: Callable[[Any], Any], part: slice, batch: int) -> Any:
        made = model(tf)
        made.compile(make(tf.keras.optimizers.legacy.SGD(0.05, momentum=0.9)), "mse")
        made.fit(x[part], y[part], batch, **options)
        return made

    one = trained(lambda optimizer: optimizer, slice(0, 8), 8)
    part = slice(4 * hvd.rank(), 4 * hvd.rank() + 4)
    passes = {"backward_passes_per_step": 2, "average_aggregated_gradients": True}
    made = trained(lambda optimizer: hvd.DistributedOptimizer(optimizer, **passes), part, 2)
    assert_equal(made.get_weights(), one.get_weights())
    check_graph_state(hvd, made, one.get_weights())
    variable = tf.Variable([0.0])
    optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.legacy.SGD(1.0), op=hvd.Sum)
    grads = optimizer.get_gradients(variable[0] * (hvd.rank() + 1.0), [variable])
    step = optimizer.apply_gradients([(grads[0], variable)])
    session = tf.compat.v1.keras.backend.get_session()
    session.run([variable.initializer, *(each.initializer for each in optimizer.weights)])
    session.run(step)
    assert session.run(variable).tolist() == [-3.0]
    check_two_in_one_run(hvd, tf)
    hvd.shutdown()


def check_two_in_one_run(hvd: Any, tf: Any) -> None:
    """Two optimizers in one `session.run`; each rank begins with the gradients of another one."""
    began: list[threading.Event] = []

    def wait(is_first: Any) -> Any:
        if is_first:
            began[-1].set()
        else:
            assert began[-1].wait(60)
        return np.float64(hvd.rank() + 1)

    steps, variables = [], []
    for number in range(2):
        factor = tf.numpy_function(wait, [number == hvd.rank()], tf.float64) * 10**number
        dense, table = tf.Variable([0.0, 0.0]), tf.Variable([[0.0], [0.0]])
        rows = tf.gather(table, [hvd.rank()])
        optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.legacy.SGD(1.0), op=hvd.Sum)
        loss = (tf.reduce_sum(dense) + tf.reduce_sum(rows)) * tf.cast(factor, dense.dtype)
        pairs = optimizer.get_gradients(loss, [dense, table]), [dense, table]
        steps.append(optimizer.apply_gradients(list(zip(*pairs, strict=True))))
        variables += [dense, table]
    # Keras initializes the other variables of the optimizers here.
    session = tf.compat.v1.keras.backend.get_session()
    session.run([each.initializer for each in variables])
    for _ in range(3):
        began.append(threading.Event())
        session.run(steps)
    found = [np.ravel(each).tolist() for each in session.run(variables)]
    assert found == [[-9.0, -9.0], [-3.0, -6.0], [-90.0, -90.0], [-30.0, -60.0]]


def check_graph_state(hvd: Any, made: Any, weights: Any) -> None:
    state = hvd.elastic.KerasState(made, epoch=hvd.rank())
    made.set_weights([each + hvd.rank() for each in weights])
    state.save()
    state.sync()
    assert state.epoch == 0
    assert_equal(made.get_weights(), weights)
    made.set_weights([each + 1 for each in weights])
    state.restore()
    assert_equal(made.get_weights(), weights)


# A lost rank


def lose_a_rank() -> float:
    """Kill the last rank inside `fit`; return after how many seconds the others raised.

    Before, these ranks make the checks that are for any number of ranks.
    """
    import tensorflow as tf

    import allstep.tensorflow.keras as hvd
    from allstep.errors import PeerLost

    tf.keras.backend.set_floatx("float64")
    hvd.init()
    for check in EXACT.values():
        check(hvd, tf, Path())
    killed = []

    def kill(batch: int, logs: Any = None) -> None:
        if batch == 2:
            killed.append(time.monotonic())
            if hvd.rank() == hvd.size() - 1:
                os.kill(os.getpid(), 9)

    made = model(tf)
    made.compile(hvd.DistributedOptimizer(tf.keras.optimizers.legacy.SGD(0.05)), "mse")
    x, y = (cases.share(each, hvd.rank(), hvd.size()) for each in cases.data())
    callback = tf.keras.callbacks.LambdaCallback(on_batch_begin=kill)
    with pytest.raises(hvd.HorovodInternalError) as caught:
        made.fit(x, y, batch_size=4, epochs=99, verbose=0, callbacks=[callback])
    assert isinstance(caught.value.__cause__, PeerLost)
    return time.monotonic() - killed[0]
