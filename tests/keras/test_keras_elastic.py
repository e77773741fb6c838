"""The elastic state of a Keras training and its callbacks, in a fixed world of two ranks."""

from typing import Any

import numpy as np
import pytest

from support.keras_ranks import all_equal, on_backends, run_keras_checks
from support.ranks import Ranks

pytestmark = pytest.mark.usefixtures("peers")

X = np.random.default_rng(0).normal(size=(24, 4)).astype("float32")
Y = np.arange(24) % 3


@on_backends
def test_elastic(ranks: Ranks, backend: str) -> None:
    run_keras_checks(
        ranks,
        backend,
        check_save_restore_and_sync,
        check_commit_in_an_epoch,
        check_progress,
        check_run_starts_again,
        check_bad_input,
    )


def classifier(with_input: bool = True, is_compiled: bool = True) -> Any:
    import keras

    layers = [keras.layers.Dense(5, activation="tanh"), keras.layers.Dense(3)]
    model = keras.Sequential([keras.Input((4,)), *layers] if with_input else layers)
    if is_compiled:
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.01), loss)
    return model


def values_of(state: Any) -> list[Any]:
    import keras

    variables = [*state.model.weights, *state.optimizer.variables]
    return [np.array(keras.ops.convert_to_numpy(each)) for each in variables]


def same(first: list[Any], second: list[Any]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


def fit(model: Any, callbacks: list[Any], epochs: int = 1, **options: Any) -> None:
    model.fit(X, Y, batch_size=8, epochs=epochs, verbose=0, callbacks=callbacks, **options)


def check_save_restore_and_sync() -> None:
    import allstep.keras as hvd
    from allstep.hvd.place import rank

    state = hvd.elastic.KerasState(classifier(), epoch=rank(), batch=5)
    begun = values_of(state)
    fit(state.model, [])
    state.epoch = 7
    assert not same(values_of(state), begun)
    state.restore()
    assert same(values_of(state), begun) and (state.epoch, state.batch) == (rank(), 5)
    fit(state.model, [])
    trained = values_of(state)
    state.commit()
    fit(state.model, [])
    state.restore()
    assert same(values_of(state), trained)
    assert not all_equal(values_of(state))
    state.sync()
    assert all_equal(values_of(state)) and state.epoch == 0
    if rank() == 0:
        assert same(values_of(state), trained)
    synced = values_of(state)
    fit(state.model, [])
    state.restore()
    assert same(values_of(state), synced)
    # The restored state is the one that trains.
    fit(state.model, [])
    assert not same(values_of(state), synced)


def check_commit_in_an_epoch() -> None:
    import keras

    import allstep.keras as hvd

    class Stop(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 2:
                found.append(values_of(state))
                raise KeyboardInterrupt

    found: list[Any] = []
    state = hvd.elastic.KerasState(classifier(), batch=0)
    before = recorder(state, found)
    callbacks = [
        hvd.elastic.UpdateBatchStateCallback(state),
        hvd.elastic.CommitStateCallback(state, batches_per_commit=2),
        before,
        Stop(),
    ]
    with pytest.raises(KeyboardInterrupt):
        fit(state.model, callbacks)
    state.restore()
    # Batches 0 and 1 are in the commit; batch 2 is not.
    assert state.batch == 1
    assert same(values_of(state), found[1]) and not same(found[1], found[2])
    assert found[1][4] == 2


def recorder(state: Any, found: list[Any]) -> Any:
    """Return a callback that records the values after each batch."""
    import keras

    class Recorder(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            assert self.model is state.model
            found.append(values_of(state))

    return Recorder()


def check_progress() -> None:
    import keras

    import allstep.keras as hvd

    state = hvd.elastic.KerasState(classifier(), epoch=2, batch=1)
    seen: list[Any] = []

    class Spy(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            seen.append(self.params["steps"])

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            seen.append((state.epoch, state.batch))

    callbacks = [
        hvd.elastic.UpdateEpochStateCallback(state),
        hvd.elastic.UpdateBatchStateCallback(state),
        hvd.elastic.CommitStateCallback(state, 100),
        Spy(),
    ]
    fit(state.model, callbacks, epochs=2)
    assert seen == [2, (2, 0), (2, 1), (2, 2), 3, (3, 0), (3, 1), (3, 2)]
    assert (state.epoch, state.batch) == (4, 0)
    fit(state.model, callbacks)
    assert state.epoch == 5
    # The commit at the end of the epoch has it.
    state.epoch = 0
    state.restore()
    assert state.epoch == 5


def check_run_starts_again() -> None:
    import allstep.keras as hvd
    from allstep.hvd.exceptions import HorovodInternalError, HostsUpdatedInterrupt
    from allstep.hvd.place import rank

    calls: list[Any] = []

    @hvd.elastic.run
    def train(state: Any) -> str:
        assert all_equal(values_of(state))
        calls.append(state.epoch)
        fit(state.model, [hvd.elastic.UpdateEpochStateCallback(state)])
        if len(calls) == 1:
            state.commit()
            fit(state.model, [])
            raise HorovodInternalError("lost")
        if len(calls) == 2:
            raise HostsUpdatedInterrupt(skip_sync=False)
        return "done"

    state = hvd.elastic.KerasState(classifier(), epoch=rank())
    resets: list[int] = []
    state.register_reset_callbacks([lambda: resets.append(state.epoch)])
    assert train(state) == "done"
    assert calls == [0, 1, 2] and resets == [1, 2] and state.epoch == 3


def check_bad_input() -> None:
    import keras

    import allstep.keras as hvd

    with pytest.raises(ValueError, match="has no weights yet"):
        hvd.elastic.KerasState(classifier(with_input=False))
    with pytest.raises(ValueError, match="has no optimizer"):
        hvd.elastic.KerasState(classifier(is_compiled=False))
    state = hvd.elastic.KerasState(
        classifier(is_compiled=False), keras.optimizers.SGD(0.1), epoch=1
    )
    state.sync()
    assert state.epoch == 1 and state.optimizer.built
