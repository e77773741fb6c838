"""Training with allstep.tensorflow: two workers have the gradients and weights of one."""

import os
import signal
from typing import Any

import numpy
import pytest

from support.alone import world_of_one
from support.ranks import Ranks

pytestmark = pytest.mark.usefixtures("peers")


def start(**options: Any) -> tuple[Any, Any, int, int]:
    import tensorflow as tf

    import allstep.tensorflow as hvd

    hvd.init(**options)
    return tf, hvd, hvd.rank(), hvd.size()


def stop(hvd: Any) -> None:
    hvd.join()
    hvd.shutdown()


def samples() -> tuple[Any, Any]:
    """The global batch of 8 samples."""
    random = numpy.random.RandomState(3)
    return random.rand(8, 5), random.rand(8, 2)


class Model:
    """Two smooth layers and an embedding, in float64; the same weights on every rank."""

    def __init__(self, tf: Any) -> None:
        random = numpy.random.RandomState(1)
        self.tf = tf
        self.first = tf.Variable(random.rand(5, 7) - 0.5)
        self.second = tf.Variable(random.rand(7, 2) - 0.5)
        self.bias = tf.Variable(numpy.zeros(2))
        self.table = tf.Variable(random.rand(8, 7) - 0.5)
        self.variables = [self.first, self.bias, self.second, self.table]

    def loss(self, x: Any, y: Any, rows: Any) -> Any:
        tf = self.tf
        hidden = tf.tanh(x @ self.first + tf.gather(self.table, rows))
        return tf.reduce_mean((hidden @ self.second + self.bias - y) ** 2)


def train(tf: Any, model: Model, part: slice, wrap: Any, traced: bool) -> list[Any]:
    """Three steps of SGD on a part of the global batch; the losses."""
    x, y = samples()
    rows = numpy.arange(8) % 3

    def step(x: Any, y: Any, rows: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = model.loss(x, y, rows)
        grads = wrap(tape).gradient(loss, model.variables)
        for variable, grad in zip(model.variables, grads, strict=True):
            variable.assign_sub(0.5 * tf.convert_to_tensor(grad))
        return loss

    run = tf.function(step) if traced else step
    given = [tf.constant(each[part]) for each in (x, y, rows)]
    return [float(run(*given)) for _ in range(3)]


def tape() -> None:
    tf, hvd, rank, _ = start()
    part = slice(rank * 4, rank * 4 + 4)
    for traced in (False, True):
        one = Model(tf)
        expected = train(tf, one, slice(0, 8), lambda tape: tape, traced)
        for options in (
            {},
            {"sparse_as_dense": True},
            {"op": hvd.Average, "gradient_predivide_factor": 4.0, "sparse_as_dense": True},
            {"groups": 2},
        ):
            model = Model(tf)
            wrap = lambda tape, options=options: hvd.DistributedGradientTape(tape, **options)  # noqa: E731
            losses = train(tf, model, part, wrap, traced)
            mean = numpy.mean(hvd.allgather_object(losses), 0)
            numpy.testing.assert_allclose(mean, expected, rtol=1e-10)
            for found, wanted in zip(model.variables, one.variables, strict=True):
                numpy.testing.assert_allclose(found, wanted, rtol=1e-10, atol=1e-12)
    check_tape_details(tf, hvd, rank)
    check_layers(tf, hvd, rank)
    check_variables(tf, hvd, rank)
    check_errors(tf, hvd, rank)
    check_keras_2(hvd, rank)
    stop(hvd)
    with world_of_one(hvd):
        check_one_worker(tf, hvd)


def check_one_worker(tf: Any, hvd: Any) -> None:
    """A world of one worker: the gradients are those of the plain tape, and collectives copy."""
    for traced in (False, True):
        one, model = Model(tf), Model(tf)
        expected = train(tf, one, slice(0, 8), lambda tape: tape, traced)
        losses = train(tf, model, slice(0, 8), hvd.DistributedGradientTape, traced)
        numpy.testing.assert_allclose(losses, expected, rtol=1e-12)
        for found, wanted in zip(model.variables, one.variables, strict=True):
            numpy.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-14)
    variable = tf.Variable([1.0, 2.0])
    optimizer = hvd.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.5))
    optimizer.minimize(lambda: tf.reduce_sum(variable))
    assert variable.numpy().tolist() == [0.5, 1.5]
    reduced = hvd.allreduce(variable, op=hvd.Sum)
    variable.assign([7.0, 7.0])
    assert reduced.numpy().tolist() == [0.5, 1.5]
    assert hvd.allgather(variable).numpy().tolist() == [7.0, 7.0]
    hvd.broadcast_variables([variable], root_rank=0)
    assert hvd.broadcast_object("here") == "here" and int(hvd.join()) == 0


def check_tape_details(tf: Any, hvd: Any, rank: int) -> None:
    from allstep.hvd.reduced_marks import is_reduced

    shared, own, unused = tf.Variable([1.0, 2.0]), tf.Variable([3.0]), tf.Variable([4.0])

    def gradients(**options: Any) -> list[Any]:
        with hvd.DistributedGradientTape(tf.GradientTape(), **options) as tape:
            loss = (rank + 1.0) * (tf.reduce_sum(shared) + tf.reduce_sum(own))
        assert isinstance(tape, tf.GradientTape) and type(tape).__name__ == "GradientTape"
        tape.register_local_source(own)
        found: list[Any] = tape.gradient(loss, [shared, own, unused])
        return found

    with hvd.DistributedGradientTape(tf.GradientTape()) as both:
        loss = (rank + 1.0) * (tf.reduce_sum(shared) + tf.reduce_sum(own))
    both.register_local_source(own)
    local_pairs, other_pairs = both.get_local_and_global_gradients(loss, [shared, own])
    assert [(v is own, g.numpy().tolist()) for v, g in local_pairs] == [(True, [(rank + 1) / 2])]
    assert [(v is shared, g.numpy().tolist()) for v, g in other_pairs] == [(True, [1.5, 1.5])]
    reduced, local, none = gradients()
    assert reduced.numpy().tolist() == [1.5, 1.5] and local.numpy().tolist() == [(rank + 1) / 2]
    assert none is None and is_reduced(reduced) and is_reduced(local)
    reduced, local, _ = gradients(op=hvd.Sum, scale_local_gradients=False)
    assert reduced.numpy().tolist() == [3.0, 3.0] and local.numpy().tolist() == [rank + 1.0]
    reduced, _, _ = gradients(compression=hvd.Compression.fp16)
    assert reduced.dtype == tf.float32 and reduced.numpy().tolist() == [1.5, 1.5]
    reduced, _, _ = gradients(op=hvd.Adasum)
    assert reduced.numpy().tolist() == [1.5, 1.5]
    with pytest.raises(ValueError, match=r"gradient_predivide_factor=2\.0 with op"):
        gradients(op=hvd.Sum, gradient_predivide_factor=2.0)
    with pytest.raises(ValueError, match="groups='x'"):
        gradients(groups="x")


def check_layers(tf: Any, hvd: Any, rank: int) -> None:
    """Batch normalization of uneven batches, and a tape with local layers, on Keras 3."""
    x = numpy.random.RandomState(5).rand(9, 4, 3)
    weights = numpy.random.RandomState(6).rand(9, 4, 3)
    own = slice(0, 2) if rank == 0 else slice(2, 9)
    plain = tf.keras.layers.BatchNormalization(dtype="float64")
    synced = hvd.SyncBatchNormalization(dtype="float64")
    assert isinstance(synced, tf.keras.layers.BatchNormalization)

    def step(layer: Any, part: slice) -> list[Any]:
        given = tf.constant(x[part])
        with tf.GradientTape() as tape:
            tape.watch(given)
            result = layer(given, training=True)
            loss = tf.reduce_sum(result**3 * weights[part])
        return [result, tape.gradient(loss, given)]

    for traced in (False, True):
        run = (lambda *args: tf.function(lambda: step(*args))()) if traced else step
        expected = [each[own] for each in run(plain, slice(0, 9))]
        for found, wanted in zip(run(synced, own), expected, strict=True):
            numpy.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-9)
    for found, wanted in zip(synced.variables, plain.variables, strict=True):
        numpy.testing.assert_allclose(found, wanted, rtol=1e-9)
    with pytest.raises(ValueError, match="fused=True"):
        hvd.SyncBatchNormalization(fused=True)
    layer = tf.keras.layers.Dense(1, use_bias=False)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(tf.ones((1, 2)))) * (rank + 1)
    tape = hvd.PartialDistributedGradientTape(tape, local_layers=[layer])
    (grad,) = tape.gradient(loss, layer.trainable_weights)
    assert grad.numpy().tolist() == [[(rank + 1) / 2]] * 2
    with pytest.raises(ValueError, match="local_layers"):
        hvd.PartialDistributedGradientTape(tf.GradientTape(), local_layers=[3])


def check_variables(tf: Any, hvd: Any, rank: int) -> None:
    kinds = [numpy.float32, numpy.float16, numpy.int64, numpy.uint32, numpy.bool_]
    variables = [tf.Variable(numpy.asarray([rank, 1]).astype(kind)) for kind in kinds]
    hvd.broadcast_variables(variables, root_rank=1)
    assert all(each.numpy().astype(int).tolist() == [1, 1] for each in variables)
    variable = tf.Variable(float(rank))
    assert hvd.broadcast_([variable], 1)[0] is variable and float(variable) == 1.0
    tf.function(lambda: hvd.broadcast_variables([variable.assign(0.0 + rank)], 0))
    model = tf.keras.Sequential([tf.keras.layers.Input((2,)), tf.keras.layers.Dropout(0.5)])
    hvd.broadcast_variables(model.variables, root_rank=0)
    with pytest.raises(RuntimeError, match="eager mode"):
        hvd.broadcast_global_variables(0)
    assert hvd.broadcast_object({"from": rank}, root_rank=1) == {"from": 1}
    assert hvd.broadcast_object_fn(root_rank=1)(rank) == 1
    assert hvd.allgather_object([rank]) == [[0], [1]]


def check_errors(tf: Any, hvd: Any, rank: int) -> None:
    from allstep.errors import CollectiveMismatch
    from allstep.tensorflow.tf_errors import as_of_contract

    with pytest.raises(tf.errors.FailedPreconditionError, match="tensor shapes") as caught:
        hvd.allreduce(tf.zeros(3 + rank))
    assert isinstance(caught.value.__cause__, hvd.HorovodInternalError)
    assert isinstance(caught.value.__cause__.__cause__, CollectiveMismatch)
    with pytest.raises(tf.errors.FailedPreconditionError, match="data types"):
        hvd.allgather(tf.zeros(3, tf.float32 if rank else tf.float64))
    for wrong in (
        lambda: hvd.broadcast(tf.zeros(1), 7),
        lambda: hvd.alltoall(tf.zeros(3), [1, 1, 1]),
        lambda: hvd.reducescatter(tf.zeros([])),
        lambda: hvd.reducescatter(tf.zeros(4), op=hvd.Min),
        lambda: hvd.allreduce(tf.constant("text")),
        lambda: hvd.size_op(99),
    ):
        with pytest.raises(tf.errors.InvalidArgumentError) as caught:
            wrong()
        assert caught.value.__cause__ is not None
        with pytest.raises(tf.errors.InvalidArgumentError):
            tf.function(lambda wrong=wrong: wrong())()
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            node = wrong()
            with pytest.raises(tf.errors.InvalidArgumentError):
                session.run(node)
    with pytest.raises(tf.errors.UnknownError, match="tensor shapes") as caught:
        tf.function(lambda: hvd.allreduce(tf.zeros(3 + rank)))()
    assert isinstance(as_of_contract(caught.value), tf.errors.FailedPreconditionError)
    check_late(tf, hvd)


def check_late(tf: Any, hvd: Any) -> None:
    """A rank that does not come in time is an AbortedError, and what elastic training survives."""
    from allstep.errors import CollectiveTimeout
    from allstep.tensorflow.calls import Called, Spec, run
    from allstep.tensorflow.tf_errors import as_of_contract

    def work(tensors: Any, name: str) -> Any:
        late = CollectiveTimeout("rank 1 was late", rank=0, op=name)
        raise hvd.HorovodInternalError("rank 1 was late") from late

    def wait() -> Any:
        return run(work, [tf.zeros(1)], [Spec(tf.float32)], Called("Late"))

    with pytest.raises(tf.errors.AbortedError, match="rank 1 was late") as caught:
        wait()
    assert isinstance(caught.value, hvd.HorovodInternalError)
    with pytest.raises(tf.errors.UnknownError, match="rank 1 was late") as caught:
        tf.function(wait)()
    known = as_of_contract(caught.value)
    assert isinstance(known, tf.errors.AbortedError)
    assert isinstance(known, hvd.HorovodInternalError)


def check_keras_2(hvd: Any, rank: int) -> None:
    """Batch normalization of Keras 2."""
    import tensorflow as tf
    import tf_keras

    from allstep.tensorflow import sync_batch_norm

    x = numpy.random.RandomState(5).rand(9, 3)
    kind = type("Sync", (sync_batch_norm._Keras2, tf_keras.layers.BatchNormalization), {})
    expected = tf_keras.layers.BatchNormalization(dtype="float64", fused=False)(x, training=True)
    own = slice(0, 2) if rank == 0 else slice(2, 9)
    found = kind(dtype="float64")(tf.constant(x[own]), training=True)
    numpy.testing.assert_allclose(found, expected[own], rtol=1e-9, atol=1e-9)


def test_two_workers_have_the_gradients_of_one(ranks: Ranks) -> None:
    ranks(2, tape, timeout=100)


def graphs() -> None:
    tf, hvd, rank, _ = start(process_sets="dynamic")
    v1 = tf.compat.v1
    x, y = samples()
    part = slice(rank * 4, rank * 4 + 4)

    def weights(wrap: Any, given: slice, steps: int, seed: int, optimizer: Any) -> Any:
        """The weights after some steps in a Session with a hook that broadcasts rank 0's."""
        with tf.Graph().as_default():
            start = numpy.random.RandomState(seed).rand(5, 2)
            weight = v1.get_variable("w", initializer=start, use_resource=steps != 2)
            loss = tf.reduce_mean((tf.tanh(x[given] @ weight) - y[given]) ** 2)
            train = wrap(optimizer()).minimize(
                loss, global_step=v1.train.get_or_create_global_step()
            )
            hooks = [hvd.BroadcastGlobalVariablesHook(0)]
            with v1.train.MonitoredTrainingSession(hooks=hooks) as session:
                for _ in range(steps):
                    session.run(train)
                assert session.run(v1.train.get_global_step()) == steps
                return session.run(weight)

    def momentum() -> Any:
        return v1.train.MomentumOptimizer(0.5, 0.9)

    one = weights(lambda each: each, slice(0, 8), 3, 0, momentum)
    two = weights(hvd.DistributedOptimizer, part, 3, rank, momentum)
    numpy.testing.assert_allclose(two, one, rtol=1e-10)
    for average in (True, False):
        wrap = lambda each, average=average: hvd.DistributedOptimizer(  # noqa: E731
            each, backward_passes_per_step=2, average_aggregated_gradients=average
        )
        found = weights(wrap, part, 6, rank, momentum)
        rate = 0.5 if average else 1.0
        one = weights(
            lambda each: each,
            slice(0, 8),
            3,
            0,
            lambda rate=rate: v1.train.MomentumOptimizer(rate, 0.9),
        )
        numpy.testing.assert_allclose(found, one, rtol=1e-10)
    adasum = weights(
        lambda each: hvd.DistributedOptimizer(each, op=hvd.Adasum), slice(0, 8), 2, 0, momentum
    )
    one = weights(lambda each: each, slice(0, 8), 2, 0, momentum)
    numpy.testing.assert_allclose(adasum, one, rtol=1e-6)
    check_optimizer_details(tf, hvd, rank)
    check_rows_and_passes(tf, hvd, rank)
    check_sets_and_join(tf, hvd, rank)
    check_states(tf, hvd, rank)
    stop(hvd)


def check_optimizer_details(tf: Any, hvd: Any, rank: int) -> None:
    v1 = tf.compat.v1
    variable, own = tf.Variable([1.0, 2.0]), tf.Variable([1.0])
    optimizer = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(0.5))
    optimizer.register_local_var(own)
    optimizer.minimize(lambda: (rank + 1.0) * (tf.reduce_sum(variable) + own[0]))
    assert variable.numpy().tolist() == [0.25, 1.25]
    assert own.numpy().tolist() == [1 - 0.25 * (rank + 1)]
    with pytest.raises(ValueError, match=r"DistributedGradientDescentOptimizer is .* once"):
        hvd.DistributedOptimizer(optimizer)
    with pytest.raises(ValueError, match=r"call hvd.DistributedGradientTape once"):
        hvd.DistributedGradientTape(hvd.DistributedGradientTape(tf.GradientTape()))
    with pytest.raises(ValueError, match="backward_passes_per_step=2"):
        hvd.DistributedOptimizer(v1.train.AdamOptimizer(), backward_passes_per_step=2)
    with pytest.raises(ValueError, match="average_aggregated_gradients"):
        hvd.DistributedOptimizer(
            v1.train.AdamOptimizer(), op=hvd.Adasum, average_aggregated_gradients=True
        )
    with pytest.raises(ValueError, match="expected an optimizer"):
        hvd.DistributedOptimizer(3)
    made = hvd.DistributedOptimizer(tf.keras.optimizers.SGD(), op=hvd.Sum, name="x")
    assert type(made).__module__ == "horovod._keras" and made._settings.op == hvd.Sum


def check_rows_and_passes(tf: Any, hvd: Any, rank: int) -> None:
    """IndexedSlices with several passes: an error, or their sum as dense gradients."""
    v1 = tf.compat.v1
    with tf.Graph().as_default():
        table = v1.get_variable("table", initializer=numpy.zeros((2, 1)))
        loss = tf.reduce_sum(tf.gather(table, [rank]))

        def step(**options: Any) -> Any:
            plain = v1.train.GradientDescentOptimizer(1.0)
            made = hvd.DistributedOptimizer(plain, backward_passes_per_step=2, **options)
            return made.minimize(loss)

        with pytest.raises(ValueError, match=r"IndexedSlices with .*=2: .* sparse_as_dense=True"):
            step()
        train = step(sparse_as_dense=True)
        with v1.Session() as session:
            session.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
            for expected in ([[0.0], [0.0]], [[-1.0], [-1.0]]):
                session.run(train)
                assert session.run(table).tolist() == expected


def check_sets_and_join(tf: Any, hvd: Any, rank: int) -> None:
    only = hvd.add_process_set([1])
    found = hvd.size_op(only.process_set_id), hvd.process_set_included_op(only.process_set_id)
    assert [int(each) for each in found] == [1, rank]
    variable = tf.Variable([1.0])
    with tf.GradientTape() as tape:
        loss = variable * (rank + 1.0)
    tape = hvd.DistributedGradientTape(tape, process_set=only)
    assert float(tape.gradient(loss, [variable])[0][0]) == rank + 1.0
    if rank:
        assert float(hvd.allreduce(tf.constant(2.0), process_set=only)) == 2.0
    for _ in range(1 + rank):
        hvd.allreduce(tf.constant(1.0))
        with tf.GradientTape() as tape:
            loss = variable * 2.0
        hvd.DistributedGradientTape(tape).gradient(loss, [variable])
    assert int(hvd.join()) == 1
    assert float(hvd.allreduce(tf.constant(1.0))) == 1.0


def check_states(tf: Any, hvd: Any, rank: int) -> None:
    variable = tf.Variable([float(rank)])
    state = hvd.elastic.TensorFlowState([variable], batch=rank)
    state.sync()
    assert float(variable[0]) == 0.0 and state.batch == 0
    variable.assign([5.0])
    state.batch = 7
    state.commit()
    variable.assign([6.0])
    state.batch = 8
    state.restore()
    assert float(variable[0]) == 5.0 and state.batch == 7
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        variable = tf.compat.v1.get_variable("v", initializer=float(rank))
        session.run(tf.compat.v1.global_variables_initializer())
        state = hvd.elastic.TensorFlowState(session=session)
        state.sync()
        assert session.run(variable) == 0.0
        session.run(tf.compat.v1.assign(variable, 3.0))
        state.restore()
        assert session.run(variable) == 0.0
    check_keras_state(tf, hvd, rank)
    check_elastic_run(tf, hvd, rank)


def check_keras_state(tf: Any, hvd: Any, rank: int) -> None:
    with pytest.raises(ValueError, match="not built"):
        hvd.elastic.TensorFlowKerasState(tf.keras.Sequential([tf.keras.layers.Dense(2)]))
    tf.keras.utils.set_random_seed(rank)
    model = tf.keras.Sequential([tf.keras.layers.Input((3,)), tf.keras.layers.Dense(2)])
    optimizer = tf.keras.optimizers.Adam()
    optimizer.build(model.trainable_variables)
    state = hvd.elastic.TensorFlowKerasState(model, optimizer, epoch=rank)
    state.sync()
    everyone = hvd.allgather_object([each.tolist() for each in model.get_weights()])
    assert everyone[0] == everyone[1] and state.epoch == 0
    saved = [each.tolist() for each in model.get_weights()]
    optimizer.apply([tf.ones_like(each) for each in model.trainable_variables])
    assert int(optimizer.iterations) == 1
    state.restore()
    assert [each.tolist() for each in model.get_weights()] == saved
    assert int(optimizer.iterations) == 0


def check_elastic_run(tf: Any, hvd: Any, rank: int) -> None:
    """An error inside a graph has the type that it has in eager mode; other errors stay."""

    @hvd.elastic.run
    def train(state: Any, kind: str) -> None:
        if kind == "graph":
            tf.function(lambda: hvd.allreduce(tf.zeros(3 + rank)))()
        raise tf.errors.UnknownError(None, None, "something else")

    with pytest.raises(tf.errors.FailedPreconditionError, match="tensor shapes"):
        train(hvd.elastic.TensorFlowState([]), "graph")
    with pytest.raises(tf.errors.UnknownError, match="something else"):
        train(hvd.elastic.TensorFlowState([]), "other")


def test_optimizers_in_a_session_process_sets_and_states(ranks: Ranks) -> None:
    ranks(2, graphs, timeout=100)


def lose() -> list[str]:
    """Rank 1 dies while rank 0 waits for it: eagerly, and in a graph."""
    tf, hvd, rank, _ = start()
    hvd.allreduce(tf.constant(1.0))
    traced = tf.function(lambda: hvd.allreduce(tf.constant(1.0)))
    traced()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    from allstep.errors import PeerLost
    from allstep.tensorflow.tf_errors import as_of_contract

    with pytest.raises(tf.errors.UnknownError) as caught:
        traced()
    known = as_of_contract(caught.value)
    assert isinstance(known, hvd.HorovodInternalError)
    assert isinstance(known, tf.errors.UnknownError)
    with pytest.raises(tf.errors.UnknownError) as caught:
        hvd.allreduce(tf.constant(1.0))
    assert isinstance(caught.value, hvd.HorovodInternalError)
    assert isinstance(caught.value.__cause__.__cause__, PeerLost)
    return ["right"]


def test_a_lost_rank_is_an_unknown_error_and_horovods(ranks: Ranks) -> None:
    first, second = ranks.outcomes(2, lose, timeout=100)
    assert first.result == ["right"], first.output
    assert second.exit_code == -signal.SIGKILL
