"""Checks of `allstep.keras`, to be called on all ranks together; see `keras_cases`.

Many checks share one start of ranks, since the import of a framework takes seconds. The reference
is the plain optimizer with whole batches, in the same process.
"""

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support import keras_cases as cases
from support.alone import world_of_one
from support.keras_surface import check_surface

Check = Callable[[Any, Path], None]


def run(checks: list[str], folder: Path, alone: list[str] | None = None) -> None:
    """Call the checks with these names, with `allstep.keras` and a folder for this run.

    `alone`: names of checks that each rank repeats afterwards, in a world of one worker.
    """
    cases.prepare()
    import keras

    import allstep.keras as hvd

    with pytest.raises(ValueError, match=r"call hvd\.init\(\) first"):
        hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    hvd.init()
    _call(checks, hvd, folder)
    hvd.shutdown()
    if alone:
        with world_of_one(hvd):
            _call(alone, hvd, folder)


def _call(checks: list[str], hvd: Any, folder: Path) -> None:
    for name in checks:
        started = time.monotonic()
        globals()[name](hvd, folder)
        print(f"{name}: {time.monotonic() - started:.1f} s", flush=True)


def assert_equal(found: Any, expected: Any, tolerance: float = 1e-10) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance)


def numbers(variable: Any) -> Any:
    """The value of a variable as a numpy array."""
    import keras

    return keras.ops.convert_to_numpy(variable)


def on_one_rank(hvd: Any, compute: Callable[[], Any]) -> Any:
    """Compute a reference on rank 0 for all: most of it is compiling, which takes seconds."""
    from allstep.hvd.objects import broadcast_object

    return broadcast_object(compute() if hvd.rank() == 0 else None, 0)


def backend() -> str:
    import keras

    return str(keras.backend.backend())


# One worker and several


def _compare(hvd: Any, names: list[str]) -> None:
    for name in names:
        make = cases.plain_optimizers()[name]
        losses, expected = on_one_rank(hvd, lambda make=make: cases.train(make(), 0, 1))
        mine, found = cases.train(hvd.DistributedOptimizer(make()), hvd.rank(), hvd.size())
        assert_equal(found, expected)
        assert_equal(hvd.allreduce(np.array(mine)), losses)


def workers_match_one(hvd: Any, folder: Path) -> None:
    names = list(cases.plain_optimizers()) if backend() == "torch" else []
    _compare(hvd, names or ["adam, clipped", "ema", "accumulation", "decay, clipped, schedule"])


def momentum_matches(hvd: Any, folder: Path) -> None:
    _compare(hvd, ["momentum"])


def uneven_batches_match(hvd: Any, folder: Path) -> None:
    """Shares of different sizes, and a last batch of one sample: ranks without any."""
    from keras.optimizers import Adam

    x, y = (each[:31] for each in cases.data())
    data = hvd.batches(x, y, batch=10, seed=5)
    made = cases.model()
    made.compile(hvd.DistributedOptimizer(Adam(0.01, global_clipnorm=0.1)), "mse", metrics=["mae"])
    made.fit(data, epochs=2, shuffle=False, verbose=0)

    def train_alone() -> tuple[Any, Any]:
        alone = cases.model()
        alone.compile(Adam(0.01, global_clipnorm=0.1), "mse", metrics=["mae"])
        for epoch in range(2):
            order = np.random.default_rng([5, epoch]).permutation(31)
            for start in range(0, 31, 10):
                alone.train_on_batch(x[order[start : start + 10]], y[order[start : start + 10]])
        return cases.weights(alone), alone.evaluate(x, y, verbose=0)

    weights, metrics = on_one_rank(hvd, train_alone)
    assert_equal(cases.weights(made), weights)
    assert_equal(hvd.evaluate(made, x, y), metrics)


def policies_match(hvd: Any, folder: Path) -> None:
    """float32, and mixed_float16 with an infinity on one rank in one step, which all ranks skip."""
    import keras

    for policy, tolerance in (("float32", 2e-6), ("mixed_float16", 1e-3)):
        keras.config.set_dtype_policy(policy)
        bad = 16 if policy == "mixed_float16" else None
        make = partial(keras.optimizers.SGD, 0.05, momentum=0.9)
        alone, expected = on_one_rank(
            hvd, lambda make=make, bad=bad: _with_bad_sample(make(), 0, 1, bad)
        )
        state, found = _with_bad_sample(
            hvd.DistributedOptimizer(make()), hvd.rank(), hvd.size(), bad
        )
        keras.config.set_dtype_policy("float64")
        assert_equal(found, expected, tolerance)
        assert state == alone == ((2.0**14, 3) if bad else (None, 4))


State = tuple[float | None, int]
"""Of an optimizer: its loss scale and its number of updates."""


def _with_bad_sample(optimizer: Any, rank: int, size: int, bad: int | None) -> tuple[State, Any]:
    """Train one epoch in which a sample is too large for float16; state and weights."""
    made = cases.model()
    made.compile(optimizer=optimizer, loss="mse")
    x, y = cases.data()
    if bad:
        x[bad] = 1e30
    x, y = cases.share(x, rank, size), cases.share(y, rank, size)
    made.fit(x, y, batch_size=cases.BATCH // size, shuffle=False, verbose=0)
    scale = float(made.optimizer.dynamic_scale) if bad else None
    return (scale, int(made.optimizer.iterations)), cases.weights(made)


def passes_accumulate(hvd: Any, folder: Path) -> None:
    from keras.optimizers import SGD

    plain = partial(SGD, 0.05, momentum=0.9, gradient_accumulation_steps=2)
    _, expected = on_one_rank(hvd, lambda: cases.train(plain(), 0, 1))
    made = hvd.DistributedOptimizer(
        SGD(0.05, momentum=0.9), backward_passes_per_step=2, average_aggregated_gradients=True
    )
    _, found = cases.train(made, hvd.rank(), hvd.size())
    assert_equal(found, expected)
    steps = cases.EPOCHS * cases.SAMPLES // cases.BATCH
    assert int(made.iterations) == steps and made._agg_helper.counter == 0


def sums_and_compression(hvd: Any, folder: Path) -> None:
    from keras.optimizers import SGD

    _, expected = on_one_rank(hvd, lambda: cases.train(SGD(0.05), 0, 1))
    by_sum = hvd.DistributedOptimizer(SGD(0.05 / hvd.size()), op=hvd.Sum)
    assert_equal(cases.train(by_sum, hvd.rank(), hvd.size())[1], expected)
    small = hvd.DistributedOptimizer(SGD(0.05), compression=hvd.Compression.fp16)
    _, found = cases.train(small, hvd.rank(), hvd.size())
    assert_equal(found, expected, 1e-3)
    assert max(abs(a - b).max() for a, b in zip(found, expected, strict=True)) > 1e-10


def callbacks_replace_ffi(hvd: Any, folder: Path) -> None:
    """What JAX does where XLA's interface is another one."""
    if backend() != "jax":
        return
    from allstep.keras.bridges import jax_bridge

    assert jax_bridge.uses_ffi()
    original, jax_bridge.uses_ffi = jax_bridge.uses_ffi, lambda: False
    _compare(hvd, ["momentum"])
    small_floats(hvd, folder)
    jax_bridge.uses_ffi = original


# Applying gradients directly


def small_floats(hvd: Any, folder: Path) -> None:
    import keras
    from keras.optimizers import SGD

    for dtype in ("float16", "bfloat16", "float32"):
        made = hvd.DistributedOptimizer(SGD(1.0))
        variable = keras.Variable(np.zeros((3, 5)), dtype=dtype)
        empty = keras.Variable(np.zeros((0, 5)), dtype=dtype)
        grads = [keras.ops.full(each.shape, hvd.rank(), dtype) for each in (variable, empty)]
        _apply(made, grads, [variable, empty])
        found = keras.ops.convert_to_numpy(keras.ops.cast(variable, "float32"))
        assert_equal([found], [np.full((3, 5), -(hvd.size() - 1) / 2)])


def _variable(value: Any) -> Any:
    import keras

    return keras.Variable(np.array(value, dtype="float64"))


def _tensor(value: Any) -> Any:
    import keras

    return keras.ops.convert_to_tensor(np.array(value, dtype="float64"))


def apply_reduces(hvd: Any, folder: Path) -> None:
    from keras.optimizers import SGD

    made = hvd.DistributedOptimizer(SGD(1.0))
    variable = _variable([1.0, 2.0, 3.0])
    for _ in range(3):
        made.apply_gradients([(_tensor([float(hvd.rank())] * 3), variable)])
    mean = (hvd.size() - 1) / 2
    assert_equal([numbers(variable)], [np.array([1.0, 2.0, 3.0]) - 3 * mean])
    assert int(made.iterations) == 3


def local_variables_stay_local(hvd: Any, folder: Path) -> None:
    import keras
    from keras.optimizers import SGD

    for scaled in (True, False):
        made = hvd.DistributedOptimizer(SGD(1.0), scale_local_gradients=scaled)
        one, other = _variable([0.0]), _variable([0.0])
        made.register_local_var(other)
        made.apply_gradients([(_tensor([hvd.rank() + 1.0]), each) for each in (one, other)])
        own = (hvd.rank() + 1) / (hvd.size() if scaled else 1)
        assert_equal([numbers(one), numbers(other)], [[-(hvd.size() + 1) / 2], [-own]])
    layer = keras.layers.Dense(2)
    made = hvd.PartialDistributedOptimizer(SGD(1.0), local_layers=layer)
    layer.build((None, 1))
    made.apply_gradients(
        [(_tensor(np.full(each.shape, hvd.rank())), each) for each in layer.trainable_weights]
    )
    assert_equal([numbers(layer.bias)], [np.full(2, -hvd.rank() / hvd.size())])
    with pytest.raises(ValueError, match="expected layers"):
        hvd.PartialDistributedOptimizer(SGD(1.0), local_layers=["dense"])


def process_sets_reduce_among_themselves(hvd: Any, folder: Path) -> None:
    from keras.optimizers import SGD

    alone = [hvd.add_process_set([rank]) for rank in range(hvd.size())]
    made = hvd.DistributedOptimizer(SGD(1.0), process_set=alone[0])
    variable = _variable([0.0])
    made.apply_gradients([(_tensor([hvd.rank() + 1.0]), variable)])
    assert_equal([numbers(variable)], [[-(hvd.rank() + 1.0)]])
    for each in alone:
        hvd.remove_process_set(each)


def gradient_may_be_a_variable(hvd: Any, folder: Path) -> None:
    """The gradient of w*w/2 is w itself, in TensorFlow in the same memory."""
    from keras.optimizers import SGD

    made = hvd.DistributedOptimizer(SGD(0.5))
    variable = _variable(np.arange(64.0))
    value = variable.value
    if backend() == "tensorflow":
        import tensorflow as tf

        @tf.function
        def step() -> None:
            made.apply_gradients([(tf.convert_to_tensor(value), variable)])

    else:

        def step() -> None:
            made.apply_gradients([(value.detach() if backend() == "torch" else value, variable)])

    step()
    assert_equal([numbers(variable)], [np.arange(64.0) / 2])


def missing_gradients(hvd: Any, folder: Path) -> None:
    """A gradient that only one rank has counts as zero on the others; only torch can have it."""
    from keras.optimizers import SGD

    if backend() != "torch":
        return
    made = hvd.DistributedOptimizer(SGD(1.0))
    one, other = _variable([0.0]), _variable([0.0])
    gradient = _tensor([1.0]) if hvd.rank() == 0 else None
    made.apply([_tensor([1.0]), gradient], [one, other])
    assert_equal([numbers(one), numbers(other)], [[-1.0], [-1 / hvd.size()]])


def rows_are_gathered(hvd: Any, folder: Path) -> None:
    """IndexedSlices of TensorFlow, of different lengths, in a graph and eagerly."""
    if backend() != "tensorflow":
        return
    import tensorflow as tf
    from keras.optimizers import SGD

    rows = np.arange(hvd.rank() + 1)
    expected = -sum(np.arange(3) < rank + 1 for rank in range(hvd.size())) / hvd.size()
    for dense in (False, True):
        made = hvd.DistributedOptimizer(SGD(1.0), sparse_as_dense=dense)
        variable = _variable(np.zeros((3, 2)))

        step = partial(_apply_rows, made, variable, rows)
        step()
        tf.function(step)()
        assert_equal([numbers(variable)[:, 1]], [2 * expected])
    made = hvd.DistributedOptimizer(SGD(1.0), backward_passes_per_step=2)
    slices = tf.IndexedSlices(tf.ones((1, 2), tf.float64), tf.constant([0]), tf.constant([3, 2]))
    with pytest.raises(ValueError, match=r"passes_per_step=2: give .* sparse_as_dense=True"):
        made.apply_gradients([(slices, _variable(np.zeros((3, 2))))])


def _apply_rows(optimizer: Any, variable: Any, rows: Any) -> None:
    import tensorflow as tf

    values = tf.ones((len(rows), 2), tf.float64)
    slices = tf.IndexedSlices(values, tf.constant(rows), tf.constant([3, 2], tf.int64))
    optimizer.apply_gradients([(slices, variable)])


def tape_is_reduced_once(hvd: Any, folder: Path) -> None:
    """Gradients of our tape, with Sum, given to our optimizer, eagerly and in a function."""
    if backend() != "tensorflow":
        return
    import tensorflow as tf
    from keras.optimizers import SGD

    import allstep.tensorflow as hvd_tf
    from support.keras2_checks import check_tape, check_tape_with_passes

    made = hvd.DistributedOptimizer(SGD(1.0), op=hvd.Sum)
    check_tape(hvd_tf, tf, made, _variable([0.0]), _variable([0.0]))
    made = hvd.DistributedOptimizer(SGD(1.0), backward_passes_per_step=2)
    check_tape_with_passes(hvd_tf, tf, made, _variable([0.0]))


# Mixed precision


def all_skip_an_infinity(hvd: Any, folder: Path) -> None:
    """An infinity on one rank: no rank updates, and all halve the scale."""
    import keras
    from keras.optimizers import SGD

    keras.config.set_dtype_policy("mixed_float16")
    made = hvd.DistributedOptimizer(SGD(1.0))
    keras.config.set_dtype_policy("float64")
    assert isinstance(made, keras.optimizers.LossScaleOptimizer)
    assert type(made.inner_optimizer).__mro__[0].__name__ == "SGD"
    variable = _variable([0.0])
    made.build([variable])
    first = scale = float(made.dynamic_scale)
    for bad in (True, False):
        number = np.inf if bad and hvd.rank() == 1 else scale * (hvd.rank() + 1)
        _apply(made, [_tensor([number])], [variable])
        scale = float(made.dynamic_scale)
        assert scale == first / 2
    assert_equal([numbers(variable)], [[-(hvd.size() + 1) / 2]])


def _apply(optimizer: Any, grads: list[Any], variables: list[Any]) -> None:
    """Apply gradients as `fit` does on this backend."""
    if backend() != "jax":
        optimizer.apply(grads, variables)
        return
    import jax

    if not optimizer.built:
        optimizer.build(variables)
    states = [each.value for each in optimizer.variables], [each.value for each in variables]
    new, new_states = jax.jit(optimizer.stateless_apply)(states[0], grads, states[1])
    for variable, value in zip(
        [*variables, *optimizer.variables], [*new, *new_states], strict=True
    ):
        variable.assign(value)


# Saving


def saved_models_are_plain(hvd: Any, folder: Path) -> None:
    import keras

    path = folder / f"{backend()}-{hvd.rank()}.keras"
    model = cases.model()
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), loss="mse")
    x, y = (cases.share(each, hvd.rank(), hvd.size()) for each in cases.data())
    options = {"batch_size": cases.BATCH // hvd.size(), "shuffle": False, "verbose": 0}
    model.fit(x, y, **options)
    model.save(path)
    plain, again = keras.saving.load_model(path), hvd.load_model(path)
    saved = keras.saving.serialize_keras_object(model.optimizer)
    assert (saved["module"], saved["class_name"]) == ("keras.optimizers", "Adam")
    assert not hasattr(plain.optimizer, "_reduction") and hasattr(again.optimizer, "_reduction")
    assert type(plain.optimizer) is type(keras.optimizers.Adam(0.01))
    for loaded in (plain, again):
        assert int(loaded.optimizer.iterations) == cases.SAMPLES // cases.BATCH
        assert_equal(_values(loaded.optimizer), _values(model.optimizer))
    for each in (model, again):
        each.fit(x, y, **options)
    assert_equal(cases.weights(again), cases.weights(model))
    again.save(path)
    assert_equal(_values(hvd.load_model(path).optimizer), _values(model.optimizer))
    # A class of the script's own that is distributed already is used as it is.
    own = type("Own", (keras.optimizers.Adam,), {})
    made = hvd.DistributedOptimizer(own(), op=hvd.Sum)
    model.compile(optimizer=made, loss="mse")
    path = folder / f"{backend()}-own-{hvd.rank()}.keras"
    model.save(path)
    loaded = hvd.load_model(path, custom_objects={"Own": type(made)})
    assert loaded.optimizer._settings.op == hvd.Sum


def saved_mixed_models_are_plain(hvd: Any, folder: Path) -> None:
    """A model with a loss scale that has changed: saved, loaded plain and distributed, resumed."""
    import keras

    path = folder / f"{backend()}-mixed-{hvd.rank()}.keras"
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = cases.model()
        model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), loss="mse")
        x, y = cases.data()
        x[16] = 1e30
        x, y = (cases.share(each, hvd.rank(), hvd.size()) for each in (x, y))
        options = {"batch_size": cases.BATCH // hvd.size(), "shuffle": False, "verbose": 0}
        model.fit(x, y, **options)
        model.save(path)
        again = hvd.load_model(path)
        assert again.optimizer._settings.op == hvd.Average
        assert type(again.optimizer).__module__ == "horovod._keras"
        assert float(again.optimizer.dynamic_scale) == 2.0**14
        assert_equal(_values(again.optimizer), _values(model.optimizer))
        for each in (model, again):
            each.fit(x, y, **options)
        assert_equal(cases.weights(again), cases.weights(model))
        assert float(again.optimizer.dynamic_scale) == 2.0**13
    finally:
        keras.config.set_dtype_policy("float64")


def _values(optimizer: Any) -> list[Any]:
    return [numbers(each) for each in optimizer.variables]


def looks_like_the_wrapped_one(hvd: Any, folder: Path) -> None:
    from keras.optimizers import Adam

    plain = Adam(0.02, beta_1=0.8, clipnorm=1.0)
    made = hvd.DistributedOptimizer(plain)
    assert isinstance(made, Adam) and type(made).__name__ == "Adam"
    assert type(made).__module__ == "horovod._keras"
    assert made.get_config() == plain.get_config()
    assert made.from_config(made.get_config())._reduction is not made._reduction
    assert made.variables() == made.variables


def names_and_signatures(hvd: Any, folder: Path) -> None:
    check_surface(hvd, average="True")


# Wrong arguments


def wrong_arguments(hvd: Any, folder: Path) -> None:
    import keras
    from keras.optimizers import SGD

    made = hvd.DistributedOptimizer(SGD(0.1))
    with pytest.raises(ValueError, match="distributed optimizer already"):
        hvd.DistributedOptimizer(made)
    with pytest.raises(ValueError, match=r"hvd\.DistributedOptimizer\(keras"):
        keras.optimizers.LossScaleOptimizer(made)
    for op, name in ((hvd.Adasum, "hvd.Adasum"), (3, "hvd.Min"), (99, "99")):
        with pytest.raises(ValueError, match=rf"op={name} .*: use hvd\.Average or hvd\.Sum"):
            hvd.DistributedOptimizer(SGD(0.1), op=op)
    for options in (
        {"gradient_predivide_factor": 2.0, "op": hvd.Sum},
        {"backward_passes_per_step": 0},
        {"groups": -1},
        {"groups": "all"},
    ):
        with pytest.raises(ValueError, match="="):
            hvd.DistributedOptimizer(SGD(0.1), **options)
    with pytest.raises(ValueError, match="expected an optimizer of Keras 3"):
        hvd.DistributedOptimizer("sgd")
    with pytest.warns(DeprecationWarning, match="num_groups"):
        hvd.DistributedOptimizer(SGD(0.1), num_groups=2)
    hvd.DistributedOptimizer(SGD(0.1), groups=2, gradient_predivide_factor=2.0)


def another_compile_is_left_alone(hvd: Any, folder: Path) -> None:
    """A version of Keras whose `compile` is not the one that was read: a warning, and no wrapper."""
    from keras.src.trainers.trainer import Trainer

    from allstep.keras.compiled_models import install

    def compile(self: Any, optimizer: Any) -> None:
        pass

    wrapped = Trainer.compile
    try:
        Trainer.compile = compile
        with pytest.warns(UserWarning, match=r"another Trainer\.compile than 3\.15.*jit_compile"):
            install.__wrapped__()
        assert Trainer.compile is compile
    finally:
        Trainer.compile = wrapped


def callbacks_of_one_worker(hvd: Any, folder: Path) -> None:
    """Our callbacks in a world of one worker change nothing; without our optimizer, no warning."""
    import warnings

    import keras

    _, expected = cases.train(keras.optimizers.SGD(0.05, momentum=0.9), 0, 1)
    made = cases.model()
    made.compile(optimizer=keras.optimizers.SGD(0.05, momentum=0.9), loss="mse")
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(0.05, warmup_epochs=1),
    ]
    options = {"batch_size": cases.BATCH, "epochs": cases.EPOCHS, "shuffle": False, "verbose": 0}
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        made.fit(*cases.data(), callbacks=callbacks, **options)
    assert_equal(cases.weights(made), expected, 1e-6)


def xla_is_refused_on_tensorflow(hvd: Any, folder: Path) -> None:
    from keras.optimizers import SGD

    if backend() != "tensorflow":
        return
    made = cases.model()
    made.compile(optimizer=hvd.DistributedOptimizer(SGD(0.1)), loss="mse", jit_compile=True)
    with pytest.raises(ValueError, match="Leave jit_compile out"):
        made.fit(*cases.data(), verbose=0)
    made._resolve_auto_jit_compile = lambda: True
    made.compile(optimizer=hvd.DistributedOptimizer(SGD(0.1)), loss="mse")
    assert not made.jit_compile


# A lost rank


def lose_a_rank() -> float:
    """Kill rank 1 inside `fit`; return after how many seconds rank 0 raised the right class."""
    import keras

    import allstep.keras as hvd
    from allstep.errors import PeerLost

    hvd.init()
    killed = []

    class Kill(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if batch == 2:
                killed.append(time.monotonic())
                if hvd.rank() == 1:
                    os.kill(os.getpid(), 9)

    model = cases.model()
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.05)), loss="mse")
    x, y = (cases.share(each, hvd.rank(), hvd.size()) for each in cases.data())
    with pytest.raises(hvd.HorovodInternalError) as caught:
        model.fit(x, y, batch_size=cases.BATCH // 2, epochs=99, verbose=0, callbacks=[Kill()])
    assert isinstance(caught.value.__cause__, PeerLost)
    return time.monotonic() - killed[0]
