"""Every error is an MXNetError; a wrong argument is a ValueError, too, and no rank waits."""

from collections.abc import Callable
from typing import Any

import pytest

from support.ranks import Ranks

WRONG = {
    "allreduce(3.0)": "expected an NDArray: write mx.nd.array",
    "allreduce(ones, op=77)": "op=77 is not a reduction",
    "allreduce(ones, average=True, op=1)": "op supersedes average",
    "allreduce(ones.astype('bool'))": r"write array.astype\('uint8'\)",
    "allreduce(ones.tostype('row_sparse'))": r"'row_sparse', expected a dense one",
    "allreduce(ones, process_set=hvd.ProcessSet([0]))": "has no number",
    "broadcast(ones, 9)": "invalid root rank 9",
    "broadcast_(ones, -1)": "invalid root rank -1",
    "reducescatter(mx.nd.array(3.0))": "does not support scalar tensors",
    "grouped_reducescatter([ones, mx.nd.array(3.0)])": "does not support scalar tensors",
    "reducescatter(ones, op=hvd.Min)": "op=3: only Average=0 and Sum=1",
    "alltoall(mx.nd.ones((3,)))": "3 rows cannot be divided evenly among 2 ranks",
    "alltoall(ones, mx.nd.ones((2,)))": "splits must be int32",
    "alltoall(ones, [3, 3])": "splits",
    "broadcast_parameters([ones])": "invalid params of type list",
    "broadcast_parameters({'a': ones}, prefix=1)": "prefix=1: expected a string",
    "DistributedOptimizer('sgd')": r"mx.optimizer.create\('sgd', learning_rate=0.1\)",
    "DistributedOptimizer(hvd.DistributedOptimizer(sgd))": "wrap the optimizer once",
    "DistributedOptimizer(sgd, gradient_predivide_factor=0)": "must be above 0",
    "DistributedOptimizer(sgd, num_groups=-1)": "num_groups=-1",
    "DistributedTrainer([], 'sgd', prefix=3)": "prefix=3: expected a string",
    "DistributedTrainer([sparse], 'sgd')": "without sparse_grad=True",
    "DistributedTrainer([two], 'sgd')": "the parameters are on 2 devices",
}


def make(mx: Any) -> dict[str, Any]:
    """The names that `WRONG` uses."""
    sparse = mx.gluon.Parameter("sparse", shape=(2,), grad_stype="row_sparse")
    two = mx.gluon.Parameter("two", shape=(2,))
    sparse.initialize()
    two.initialize(ctx=[mx.cpu(0), mx.cpu(1)])
    sgd = mx.optimizer.create("sgd")
    return {"mx": mx, "ones": mx.nd.ones((4,)), "sparse": sparse, "two": two, "sgd": sgd}


def work() -> None:
    import allstep.mxnet as hvd
    from allstep.hvd.exceptions import HorovodInternalError

    import mxnet as mx  # isort: skip

    with pytest.raises(mx.base.MXNetError, match=r"call hvd\.init\(\) first"):
        hvd.allreduce(mx.nd.ones((2,)))
    with pytest.raises(ValueError, match=r"call hvd\.init\(\) first"):
        hvd.DistributedOptimizer(mx.optimizer.create("sgd"))
    hvd.init()
    rank = hvd.rank()
    names = {"hvd": hvd, **make(mx)}
    for expression, text in WRONG.items():
        with pytest.raises(ValueError, match=text) as caught:
            print(expression, eval(f"hvd.{expression}", names))
        assert isinstance(caught.value, mx.base.MXNetError), expression
    differ = {
        "shape": lambda: hvd.allreduce(mx.nd.ones((17 + rank, 3))),
        "dimensions": lambda: hvd.allreduce(mx.nd.ones((17, 6) if rank else (17, 2, 3))),
        "dtype": lambda: hvd.allreduce_(mx.nd.ones((2,), dtype=["int32", "float32"][rank])),
        "rows": lambda: hvd.allgather(mx.nd.ones((2, 3 + rank))),
        "scalars": lambda: hvd.allgather(mx.nd.array(3.0)),
        "root": lambda: hvd.broadcast(mx.nd.ones((2,)), rank),
        "scatter": lambda: hvd.reducescatter(mx.nd.ones((4 + rank,))),
        "alltoall": lambda: hvd.alltoall(mx.nd.ones((2,), dtype=["int32", "int64"][rank])),
        "parameters": lambda: hvd.broadcast_parameters({"a": mx.nd.ones((2 + rank,))}),
        "trainer": lambda: trainer_of(hvd, mx, 2 + rank)(),
    }
    for what, call in differ.items():
        with pytest.raises(mx.base.MXNetError) as caught:
            print(what, call())
        assert isinstance(caught.value, HorovodInternalError), what
        assert not isinstance(caught.value, ValueError), what
    # The engine still works.
    assert hvd.allreduce(mx.nd.ones((1,)), op=hvd.Sum).asscalar() == 2
    hvd.shutdown()


def trainer_of(hvd: Any, mx: Any, length: int) -> Callable[[], None]:
    """Return a function that makes a step of a trainer with one parameter."""
    parameter = mx.gluon.Parameter("weight", shape=(length,))
    parameter.initialize()
    trainer = hvd.DistributedTrainer([parameter], "sgd")

    def step() -> None:
        with mx.autograd.record():
            loss = parameter.data().sum()
        loss.backward()
        trainer.step(1)

    return step


@pytest.mark.usefixtures("peers")
def test_wrong_arguments_and_differences_between_ranks(ranks: Ranks) -> None:
    ranks(2, work)


def lose_a_rank() -> None:
    import os

    import allstep.mxnet as hvd
    from allstep.errors import PeerLost

    import mxnet as mx  # isort: skip

    hvd.init()
    step = trainer_of(hvd, mx, 3)
    step()
    if hvd.rank() == 1:
        os.kill(os.getpid(), 9)
    with pytest.raises(mx.base.MXNetError) as caught:
        step()
    assert isinstance(caught.value.__cause__, PeerLost)


@pytest.mark.usefixtures("peers")
def test_a_lost_rank_ends_the_step_of_the_others(ranks: Ranks) -> None:
    outcomes = ranks.outcomes(2, lose_a_rank)
    assert [outcome.exit_code for outcome in outcomes] == [0, -9], outcomes[0].output
