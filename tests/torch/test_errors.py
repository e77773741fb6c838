"""Every row of the contract's table of errors: the type, the words, on which ranks; and that the
engine works afterwards."""

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import allstep.torch as hvd
from allstep.errors import CollectiveMismatch, CommError
from support.hvd_ranks import running
from support.ranks import Ranks


def raises(kind: type[Exception], words: str, call: Callable[[], Any]) -> None:
    with pytest.raises(kind, match=words):
        call()


def usable(size: int) -> None:
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum, name="still works").tolist() == [size] * 2


def test_before_init() -> None:
    not_yet = "not been initialized"
    for place in (
        hvd.rank,
        hvd.size,
        hvd.local_rank,
        hvd.local_size,
        hvd.cross_rank,
        hvd.cross_size,
    ):
        raises(ValueError, not_yet, place)
    raises(ValueError, not_yet, hvd.mpi_threads_supported)
    raises(ValueError, not_yet, hvd.stop_timeline)
    raises(ValueError, not_yet, lambda: hvd.start_timeline("never.json"))
    raises(ValueError, not_yet, lambda: hvd.add_process_set([0]))
    raises(ValueError, not_yet, lambda: hvd.broadcast_object(1))
    raises(ValueError, not_yet, lambda: hvd.allreduce(torch.ones(1), op=hvd.Adasum))
    for call in (
        hvd.allreduce,
        hvd.allreduce_,
        hvd.allreduce_async,
        hvd.allgather,
        hvd.alltoall,
        hvd.reducescatter,
    ):
        raises(hvd.HorovodInternalError, not_yet, lambda call=call: call(torch.ones(1)))
    raises(hvd.HorovodInternalError, not_yet, lambda: hvd.broadcast_(torch.ones(1), 0))
    raises(hvd.HorovodInternalError, not_yet, lambda: hvd.grouped_allreduce([torch.ones(1)]))
    raises(hvd.HorovodInternalError, not_yet, hvd.barrier)
    raises(hvd.HorovodInternalError, not_yet, hvd.join)
    raises(ValueError, "not created or has been cleared", lambda: hvd.poll(1))
    assert hvd.synchronize(1) is None
    assert not hvd.is_initialized()
    hvd.shutdown()  # nothing to do


def test_init_again_and_again(ranks: Ranks) -> None:
    ranks(2, restart)


def restart() -> None:
    for _ in range(3):
        with running() as (rank, size):
            hvd.init()  # changes nothing
            assert hvd.is_initialized() and (hvd.rank(), hvd.size()) == (rank, size)
            assert hvd.allreduce_async(torch.ones(1)) == 1  # handles count from 1 again
            hvd.synchronize(1)
        test_before_init()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_wrong_arguments_concern_only_the_caller(ranks: Ranks, size: int) -> None:
    ranks(size, argue)


def argue() -> None:
    with running(process_sets="dynamic") as (rank, size):
        one = torch.ones(1)
        unregistered = hvd.ProcessSet([0])
        raises(TypeError, "has no number", lambda: hvd.allreduce(one, process_set=unregistered))
        raises(TypeError, "has no number", lambda: hvd.barrier(unregistered))
        raises(ValueError, "invalid root rank", lambda: hvd.broadcast(one, size))
        raises(ValueError, "invalid root rank", lambda: hvd.broadcast_async_(one, -1))
        raises(
            ValueError,
            "int32",
            lambda: hvd.alltoall(one, splits=torch.ones(size, dtype=torch.int64)),
        )
        raises(
            ValueError,
            "one dimension",
            lambda: hvd.alltoall(one, splits=torch.ones(1, size, dtype=torch.int32)),
        )
        raises(ValueError, "splits", lambda: hvd.alltoall(one, splits=[1] * (size + 1)))
        raises(ValueError, "splits", lambda: hvd.alltoall(one, splits=[2] * size))
        raises(ValueError, "splits", lambda: hvd.alltoall(one, splits=[-1] * size))
        if size > 1:
            raises(ValueError, "evenly", lambda: hvd.alltoall(torch.ones(size + 1)))
        raises(ValueError, "does not support scalar", lambda: hvd.reducescatter(torch.tensor(1.0)))
        raises(
            ValueError,
            "does not support scalar",
            lambda: hvd.grouped_reducescatter([one, torch.tensor(1.0)]),
        )
        only = "only supports AVERAGE and SUM"
        raises(hvd.HorovodInternalError, only, lambda: hvd.reducescatter(one, op=hvd.Min))
        raises(IndexError, "", lambda: hvd.allgather(torch.tensor(1.0)))
        raises(TypeError, "expected a tensor", lambda: hvd.allreduce(3.0))
        raises(ValueError, "dense", lambda: hvd.allreduce(torch.eye(2).to_sparse()))
        raises(
            NotImplementedError,
            "all ranks",
            lambda: hvd.allreduce(one, op=hvd.Adasum, process_set=unregistered),
        )
        if size == 3:
            raises(NotImplementedError, "power of 2", lambda: hvd.allreduce(one, op=hvd.Adasum))
        first = hvd.allreduce_async(one, name="twice") if rank == 0 else None
        if first is not None and size > 1:
            raises(
                ValueError,
                "same name as another tensor",
                lambda: hvd.allreduce_async(one, name="twice"),
            )
        hvd.barrier()  # only now the others ask for it
        result = hvd.allreduce(one, name="twice") if first is None else hvd.synchronize(first)
        assert result.item() == 1  # the first is as good as ever
        usable(size)
        if size > 1:
            few = hvd.add_process_set([0])
            if rank:
                raises(ValueError, "is not a member", lambda: hvd.allreduce(one, process_set=few))
            hvd.remove_process_set(few)
            few.process_set_id = 1
            raises(
                ValueError, "does not exist, or has not been registered", lambda: hvd.barrier(few)
            )


MISMATCHES: dict[str, tuple[Callable[[int], Any], str]] = {
    "dtype": (
        lambda r: hvd.allreduce(torch.ones(2, dtype=[torch.float32, torch.int64][r]), name="x"),
        "Mismatched data types",
    ),
    "shape": (
        lambda r: hvd.allreduce(torch.ones(17, 17 + r), name="x"),
        r"Mismatched ALLREDUCE tensor shapes.*\[17, 1[78]\]",
    ),
    "shape of a broadcast": (
        lambda r: hvd.broadcast(torch.ones(2 + r), 0, name="x"),
        "Mismatched BROADCAST tensor shapes",
    ),
    "shape of a scatter": (
        lambda r: hvd.reducescatter(torch.ones(2 + r), name="x"),
        "Mismatched REDUCESCATTER tensor shapes",
    ),
    "dimensions": (lambda r: hvd.allgather(torch.ones([1] * (1 + r)), name="x"), "tensor of rank"),
    "later dimension": (lambda r: hvd.allgather(torch.ones(1, 2 + r), name="x"), "with dimension"),
    "dimensions sent": (
        lambda r: hvd.alltoall(torch.ones([2] * (1 + r)), name="x"),
        "tensor of rank",
    ),
    "prescale": (
        lambda r: hvd.allreduce(torch.ones(1), prescale_factor=1.0 + r, name="x"),
        "prescale and/or postscale",
    ),
    "postscale": (
        lambda r: hvd.allreduce(torch.ones(1), postscale_factor=1.0 + r, name="x"),
        "prescale and/or postscale",
    ),
    "op": (
        lambda r: hvd.allreduce(torch.ones(1), op=[hvd.Min, hvd.Max][r], name="x"),
        "reduction operation",
    ),
    "root": (lambda r: hvd.broadcast(torch.ones(1), r, name="x"), "root ranks"),
    "in a group": (
        lambda r: hvd.grouped_allreduce([torch.ones(1), torch.ones(2 + r)], name="x"),
        "Mismatched ALLREDUCE tensor shapes",
    ),
    "kind": (
        lambda r: hvd.allreduce(torch.ones(2), op=[hvd.Sum, hvd.Adasum][r], name="x"),
        "Mismatched operations",
    ),
}


def test_mismatches_are_told_to_all(ranks: Ranks) -> None:
    ranks(2, differ)


def differ() -> None:
    with running() as (rank, size):
        for what, (call, words) in MISMATCHES.items():
            with pytest.raises(hvd.HorovodInternalError, match=words) as caught:
                call(rank)
            assert isinstance(caught.value.__cause__, CollectiveMismatch), what
            usable(size)
        handle = hvd.allgather_async(torch.tensor(1.0), name="scalar")
        raises(hvd.HorovodInternalError, "", lambda: hvd.synchronize(handle))
        assert hvd.synchronize(handle) is None  # a failure frees the handle too
        handle = hvd.allreduce_async(torch.ones(1 + rank), name="polled")
        while not hvd.poll(handle):  # a failed operation is over
            pass
        raises(hvd.HorovodInternalError, "shapes", lambda: hvd.synchronize(handle))
        usable(size)


def test_what_cannot_be_done_while_a_rank_has_joined(ranks: Ranks) -> None:
    ranks(2, call_after_join)


def call_after_join() -> None:
    with running() as (rank, size):
        if rank == 0:
            refused = "not supported with Join"
            raises(
                hvd.HorovodInternalError, refused, lambda: hvd.allgather(torch.ones(1), name="a")
            )
            raises(
                hvd.HorovodInternalError, refused, lambda: hvd.broadcast(torch.ones(1), 0, name="b")
            )
            raises(hvd.HorovodInternalError, refused, lambda: hvd.alltoall(torch.ones(2), name="c"))
            raises(
                hvd.HorovodInternalError,
                refused,
                lambda: hvd.reducescatter(torch.ones(2), name="d"),
            )
        assert hvd.join() == 0
        usable(size)


def test_one_shutdown_stops_all(ranks: Ranks) -> None:
    ranks(2, leave_early)


def leave_early() -> None:
    hvd.init()
    usable(2)
    if hvd.rank() == 0:
        hvd.shutdown()
        return
    raises(
        hvd.HorovodInternalError,
        "has been shut down",
        lambda: hvd.allreduce(torch.ones(1), name="nobody"),
    )
    raises(
        hvd.HorovodInternalError, "has been shut down", lambda: hvd.allreduce_async(torch.ones(1))
    )
    assert hvd.is_initialized() and (hvd.rank(), hvd.size()) == (1, 2)  # our place is still known
    hvd.shutdown()
    assert not hvd.is_initialized()


@pytest.mark.soak
def test_a_killed_rank_is_an_internal_error(ranks: Ranks) -> None:
    for victim in (0, 1):
        outcomes = ranks.outcomes(3, lose_one, victim)
        assert [outcome.exit_code for outcome in outcomes if outcome.rank != victim] == [0, 0], (
            outcomes
        )
        assert outcomes[victim].exit_code == -signal.SIGKILL


def lose_one(victim: int) -> None:
    hvd.init()
    usable(3)
    if hvd.rank() == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(hvd.HorovodInternalError) as caught:
        hvd.allreduce(torch.ones(1), name="without one")
    assert isinstance(caught.value.__cause__, CommError)
    assert time.monotonic() - began < 25
    hvd.shutdown()
