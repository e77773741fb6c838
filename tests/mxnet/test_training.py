"""Training with a fixed global batch: 2 workers have the weights of one.

float64 agrees to 1e-10; float32 to 2e-6 of the largest weight (the order of sums differs). The
activation is tanh: with ReLU the last bit of an input on its corner may decide (a correct front-end
would look wrong).
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from support.ranks import Ranks

STEPS, BATCH, FEATURES, CLASSES = 6, 12, 5, 3
# A recipe trains a model and returns the losses and the weights at the end.
Result = tuple[list[float], list[Any]]


def data() -> Iterator[tuple[Any, Any]]:
    """The global batches."""
    draw = np.random.RandomState(0)
    for _ in range(STEPS):
        yield draw.randn(BATCH, FEATURES), draw.randint(0, CLASSES, BATCH)


def make_model(mx: Any, seed: int, dtype: str) -> Any:
    """A model whose first layer is deferred: its input size is not given."""
    nn = mx.gluon.nn
    model = nn.HybridSequential()
    model.add(
        nn.Dense(8, activation="tanh"), nn.BatchNorm(use_global_stats=True), nn.Dense(CLASSES)
    )
    mx.random.seed(seed)
    model.initialize(mx.init.Normal(1.0))
    model.cast(dtype)
    model.hybridize()
    return model


def train(
    hvd: Any,
    mx: Any,
    optimizer: Any,
    options: dict[str, Any] | None,
    *,
    dtype: str = "float64",
    share: Callable[[int, int], Any] = lambda rank, size: slice(rank, None, size),
    clip: float = 0.0,
    freeze: bool = False,
    **trainer_options: Any,
) -> Result:
    """Train with the trainer; each rank has its own seed and its share of the batch."""
    rank, size = hvd.rank(), hvd.size()
    # The seed of rank 0 counts.
    model = make_model(mx, seed=7 + 100 * rank, dtype=dtype)
    hvd.broadcast_parameters(model.collect_params(), root_rank=0)
    trainer = hvd.DistributedTrainer(model.collect_params(), optimizer, options, **trainer_options)
    criterion = mx.gluon.loss.SoftmaxCrossEntropyLoss()
    losses = []
    for step, (inputs, labels) in enumerate(data()):
        if freeze and step == STEPS // 2:
            model[0].weight.grad_req = "null"
        own = share(rank, size)
        with mx.autograd.record():
            output = model(mx.nd.array(inputs[own], dtype=dtype))
            loss = criterion(output, mx.nd.array(labels[own], dtype=dtype))
        loss.backward()
        if clip:
            trainer.allreduce_grads()
            gradients = [p.grad() for p in model.collect_params().values() if p.grad_req != "null"]
            mx.gluon.utils.clip_global_norm(gradients, clip)
            trainer.update(BATCH / size)
        else:
            trainer.step(BATCH / size)
        losses.append(float(hvd.allreduce(loss.sum(), op=hvd.Sum).asscalar()) / BATCH)
    return losses, weights_of(model)


def weights_of(model: Any) -> list[Any]:
    """The weights in the order of the layers; the counters of their names differ."""
    return [p.data().asnumpy() for layer in model for p in layer.collect_params().values()]


def with_updater(hvd: Any, mx: Any, name: str, **options: Any) -> Result:
    """Train with DistributedOptimizer as the Module API does: through an updater, in lists."""
    rank, size = hvd.rank(), hvd.size()
    model = make_model(mx, seed=7 + 100 * rank, dtype="float64")
    hvd.broadcast_parameters(model.collect_params())
    plain = mx.optimizer.create(name, rescale_grad=size / BATCH, **options)
    optimizer = hvd.DistributedOptimizer(plain)
    assert plain.rescale_grad == 1 / BATCH
    updater = mx.optimizer.get_updater(optimizer)
    criterion = mx.gluon.loss.SoftmaxCrossEntropyLoss()
    losses = []
    for step, (inputs, labels) in enumerate(data()):
        with mx.autograd.record():
            output = model(mx.nd.array(inputs[rank::size], dtype="float64"))
            loss = criterion(output, mx.nd.array(labels[rank::size]))
        loss.backward()
        parameters = [p for p in model.collect_params().values() if p.grad_req != "null"]
        updater(
            list(range(len(parameters))),
            [p.grad() for p in parameters],
            [p.data() for p in parameters],
        )
        losses.append(float(hvd.allreduce(loss.sum(), op=hvd.Sum).asscalar()) / BATCH)
        if step == STEPS // 2:
            # As a script that saves its states and resumes.
            updater.set_states(updater.get_states(dump_optimizer=True))
            assert isinstance(updater.optimizer, hvd.DistributedOptimizer)
    assert updater.optimizer.learning_rate == plain.learning_rate
    return losses, weights_of(model)


def with_module(hvd: Any, mx: Any) -> Result:
    """Train with Module.fit, without a kvstore."""
    rank, size = hvd.rank(), hvd.size()
    batches = list(data())
    own = np.concatenate([inputs[rank::size] for inputs, _ in batches])
    labels = np.concatenate([labels[rank::size] for _, labels in batches])
    symbol = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=CLASSES, name="fc")
    module = mx.mod.Module(mx.sym.SoftmaxOutput(symbol, name="softmax"))
    source = mx.io.NDArrayIter(own, labels, BATCH // size, label_name="softmax_label")
    module.bind(source.provide_data, source.provide_label)
    mx.random.seed(7 + 100 * rank)
    module.init_params(mx.init.Normal(1.0))
    arguments, auxiliary = module.get_params()
    hvd.broadcast_parameters(arguments)
    hvd.broadcast_parameters(auxiliary)
    module.set_params(arguments, auxiliary)
    plain = mx.optimizer.create("sgd", learning_rate=0.1, momentum=0.9, rescale_grad=size / BATCH)
    module.fit(source, num_epoch=1, kvstore=None, optimizer=hvd.DistributedOptimizer(plain))
    return [], [array.asnumpy() for _, array in sorted(module.get_params()[0].items())]


def uneven(rank: int, size: int) -> Any:
    """The first rank has 3 samples fewer than the last."""
    return slice(0, BATCH) if size == 1 else [slice(0, 4), slice(4, BATCH)][rank]


SGD = {"learning_rate": 0.3, "momentum": 0.9, "wd": 1e-3}
ADAM = {"learning_rate": 0.05}
RECIPES: dict[str, tuple[float, Callable[[Any, Any], Result]]] = {
    "sgd": (1e-10, lambda hvd, mx: train(hvd, mx, "sgd", SGD)),
    "adam": (1e-10, lambda hvd, mx: train(hvd, mx, "adam", ADAM)),
    "float32": (2e-6, lambda hvd, mx: train(hvd, mx, "sgd", SGD, dtype="float32")),
    "uneven shares": (1e-10, lambda hvd, mx: train(hvd, mx, "sgd", SGD, share=uneven)),
    # MXNet clips float32 only.
    "clipped": (2e-6, lambda hvd, mx: train(hvd, mx, "sgd", SGD, clip=0.5, dtype="float32")),
    "frozen": (1e-10, lambda hvd, mx: train(hvd, mx, "sgd", SGD, freeze=True)),
    "predivided": (
        1e-10,
        lambda hvd, mx: train(hvd, mx, "sgd", SGD, gradient_predivide_factor=4.0, num_groups=2),
    ),
    "fp16": (
        3e-3,
        lambda hvd, mx: train(hvd, mx, "sgd", SGD, compression=hvd.Compression.fp16),
    ),
    "an optimizer": (
        1e-10,
        lambda hvd, mx: train(hvd, mx, mx.optimizer.create("sgd", **SGD), None, prefix="model"),
    ),
    "updater": (1e-10, lambda hvd, mx: with_updater(hvd, mx, "sgd", **SGD)),
    "updater, one by one": (1e-10, lambda hvd, mx: with_updater(hvd, mx, "adam", **ADAM)),
    "module": (2e-6, with_module),
}


def work() -> dict[str, Result]:
    import allstep.mxnet as hvd

    import mxnet as mx  # isort: skip

    hvd.init()
    results = {name: recipe(hvd, mx) for name, (_, recipe) in RECIPES.items()}
    hvd.allgather_object(None, name="end")
    hvd.shutdown()
    return results


@pytest.fixture(scope="module")
def trained(
    peers: None, rank_server: Ranks, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Result]]:
    """The results of one worker, then those of both ranks of two."""
    rank_server.folder = tmp_path_factory.mktemp("training")
    return [*rank_server(1, work, timeout=150), *rank_server(2, work, timeout=150)]


@pytest.mark.parametrize("name", RECIPES)
def test_two_workers_have_the_weights_of_one(trained: list[dict[str, Result]], name: str) -> None:
    tolerance = RECIPES[name][0]
    (losses, weights), first, second = (each[name] for each in trained)
    assert first[0] == second[0]
    np.testing.assert_allclose(first[0], losses, rtol=tolerance)
    for alone, of_first, of_second in zip(weights, first[1], second[1], strict=True):
        np.testing.assert_array_equal(of_first, of_second)
        np.testing.assert_allclose(of_first, alone, rtol=0, atol=tolerance * np.abs(alone).max())


def test_the_losses_fall(trained: list[dict[str, Result]]) -> None:
    """The recipes train: equal weights alone could be weights that never change."""
    for name, (losses, _) in trained[0].items():
        assert not losses or losses[-1] != losses[0], name
    assert trained[0]["sgd"][0][-1] < trained[0]["sgd"][0][0]


def check_deferred(hvd: Any, mx: Any) -> None:
    """Weights are equal before the first step; a parameter is broadcast once."""
    rank = hvd.rank()
    model = make_model(mx, seed=rank, dtype="float32")
    hvd.broadcast_parameters(model.collect_params(), root_rank=1, prefix="deferred.")
    assert model[0].weight._deferred_init
    model(mx.nd.ones((1, FEATURES)))
    for number, weight in enumerate(weights_of(model)):
        roots = hvd.broadcast(mx.nd.array(weight), 1, name=f"compare.{number}").asnumpy()
        np.testing.assert_array_equal(weight, roots)
    # Only one rank initializes again: no broadcast follows, and no rank waits.
    if rank == 0:
        model[0].weight.initialize(force_reinit=True)
    assert "_init_impl" not in vars(model[0].weight)


def check_root_with_values(hvd: Any, mx: Any) -> None:
    """The root has loaded its weights, while the initialization of the others is deferred."""
    layer = mx.gluon.nn.Dense(2, in_units=3 if hvd.rank() == 0 else 0)
    layer.initialize(mx.init.One() if hvd.rank() == 0 else mx.init.Zero())
    named = {"weight": layer.weight, "bias": layer.bias}
    hvd.broadcast_parameters(named, prefix="loaded.")
    assert layer(mx.nd.ones((1, 3))).asnumpy().tolist() == [[3.0, 3.0]]


def check_loaded_later(hvd: Any, mx: Any) -> None:
    """A file is loaded between the call and the first forward pass: the root's file counts."""
    saved = mx.gluon.nn.Dense(2, in_units=3)
    saved.initialize(mx.init.Constant(hvd.rank() + 1))
    saved.save_parameters(f"{hvd.rank()}.params")
    layer = mx.gluon.nn.Dense(2)
    layer.initialize()
    hvd.broadcast_parameters(layer.collect_params(), prefix="later.", root_rank=1)
    layer.load_parameters(f"{hvd.rank()}.params")
    assert layer(mx.nd.ones((1, 3))).asnumpy().tolist() == [[6.0, 6.0]]


def check_stale(hvd: Any, mx: Any) -> None:
    """A gradient of one rank updates all; one that no rank computed updates none."""
    names = ("both", "first", "none")
    named = {name: mx.gluon.Parameter(name, shape=(2,)) for name in names}
    for parameter in named.values():
        parameter.initialize(init="zeros")
    trainer = hvd.DistributedTrainer(named, "sgd", {"learning_rate": 1.0})
    for step in range(1, 3):
        with mx.autograd.record():
            loss = named["both"].data().sum()
            if hvd.rank() == 0:
                loss = loss + 4 * named["first"].data().sum()
        loss.backward()
        trainer.step(1, ignore_stale_grad=True)
        found = {name: named[name].data().asnumpy().tolist() for name in names}
        assert found == {"both": [-step] * 2, "first": [-2.0 * step] * 2, "none": [0.0] * 2}
    with mx.autograd.record():
        loss = named["both"].data().sum()
    loss.backward()
    with pytest.raises(UserWarning, match="has not been updated by backward"):
        trainer.step(1)


def check_unwrapping(hvd: Any, mx: Any) -> None:
    """A trainer unwraps a DistributedOptimizer, with its own scale; other trainers may use it."""
    for make in (hvd.DistributedTrainer, mx.gluon.Trainer):
        parameter = mx.gluon.Parameter("weight", shape=(2,))
        parameter.initialize(init="zeros")
        optimizer = hvd.DistributedOptimizer(mx.optimizer.create("sgd", learning_rate=1.0))
        options = {} if make is hvd.DistributedTrainer else {"kvstore": None}
        if make is hvd.DistributedTrainer:
            with pytest.warns(UserWarning, match="give the plain optimizer"):
                trainer = make([parameter], optimizer, **options)
        else:
            trainer = make([parameter], optimizer, **options)
        trainer.set_learning_rate(0.5)
        with mx.autograd.record():
            loss = (parameter.data() * 4 * (hvd.rank() + 1)).sum()
        loss.backward()
        trainer.step(2)
        assert parameter.data().asnumpy().tolist() == [-1.5, -1.5], make


def check_one_reduction(hvd: Any, mx: Any) -> None:
    """A step passes all gradients in one call and sends no request to the engine."""
    from unittest import mock

    from allstep.hvd import handles
    from allstep.hvd.gradient_list import GradientList

    model = make_model(mx, seed=1, dtype="float32")
    trainer = hvd.DistributedTrainer(model.collect_params(), "sgd")
    lengths = []

    def reduce(self: Any, arrays: Any, weight: Any = None) -> Any:
        lengths.append(len(arrays))
        return real(self, arrays, weight)

    real = GradientList.reduce
    no_request = mock.patch.object(handles, "_running", side_effect=AssertionError("a request"))
    with mock.patch.object(GradientList, "reduce", reduce), no_request:
        for _ in range(2):
            with mx.autograd.record():
                loss = model(mx.nd.ones((4, FEATURES))).sum()
            loss.backward()
            trainer.step(4)
    assert lengths == [6, 6]


def check_two_trainers(hvd: Any, mx: Any) -> None:
    """Trainers of several models, and an engine that is started again between their steps."""
    parameters, trainers = [], []
    for name in ("one", "two"):
        parameter = mx.gluon.Parameter(name, shape=(2,))
        parameter.initialize(init="zeros")
        parameters.append(parameter)
        trainers.append(
            hvd.DistributedTrainer([parameter], "sgd", {"learning_rate": 1.0}, prefix=name)
        )
    for step in range(1, 4):
        with mx.autograd.record():
            loss = sum((each.data() * (hvd.rank() + 1)).sum() for each in parameters)
        loss.backward()
        for trainer in reversed(trainers):
            trainer.step(1)
        assert [p.data().asnumpy().tolist() for p in parameters] == [[-1.5 * step] * 2] * 2
        hvd.allgather_object(None)
        hvd.shutdown()
        hvd.init()


def checks() -> None:
    import allstep.mxnet as hvd

    import mxnet as mx  # isort: skip

    hvd.init()
    check_deferred(hvd, mx)
    check_root_with_values(hvd, mx)
    check_loaded_later(hvd, mx)
    check_stale(hvd, mx)
    check_unwrapping(hvd, mx)
    check_one_reduction(hvd, mx)
    check_two_trainers(hvd, mx)
    hvd.allgather_object(None, name="end")
    hvd.shutdown()


@pytest.mark.usefixtures("peers")
def test_parameters_and_trainers_on_two_ranks(ranks: Ranks) -> None:
    ranks(2, checks)
