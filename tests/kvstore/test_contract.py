"""MXNet's contract on 1 to 3 workers: each test is a row of it.

The reference is MXNet's documentation, and for updates torch's own optimizer on one tensor.
"""

import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import allstep
import allstep.kvstore
from allstep.errors import UserError
from support.ranks import Ranks

WORKERS = pytest.mark.parametrize("num_workers", [1, 2, 3])
LARGE = (3, 100_000)
"""A slice and a part of a second."""


def pulled(kv: allstep.kvstore.KVStore, key: Any, shape: tuple[int, ...] = (2, 3)) -> Tensor:
    out = torch.full(shape, -1.0)
    kv.pull(key, out=out)
    return out


def the_number(value: Tensor) -> float:
    """Return the number that all elements of a value are."""
    first = value.reshape(-1)[0]
    assert (value == first).all(), value
    return first.item()


def is_filled(value: Tensor, number: float) -> bool:
    return bool((value == number).all())


@pytest.mark.parametrize("name", ["local", "device", "NCCL"])
def test_a_local_store_replaces_the_value_by_the_sum(name: str) -> None:
    kv = allstep.kvstore.create(name)
    kv.init([3, 5], [torch.ones(2, 3), torch.zeros(4)])
    assert is_filled(pulled(kv, 3), 1)
    kv.push(3, [torch.full((2, 3), float(n)) for n in range(4)])
    assert is_filled(pulled(kv, 3), 6)
    outs = [torch.empty(2, 3), torch.empty(2, 3)]
    kv.pull(3, out=outs)
    assert all(is_filled(out, 6) for out in outs)
    kv.push([3, 5], [[torch.ones(2, 3)] * 2, torch.ones(4)])
    assert is_filled(pulled(kv, 3), 2) and is_filled(pulled(kv, 5, (4,)), 1)
    assert (kv.type, kv.rank, kv.num_workers) == (name.lower(), 0, 1)
    kv.barrier()


def test_a_local_store_has_an_updater_of_the_script() -> None:
    kv = allstep.kvstore.create("local")
    kv.init(3, torch.ones(2, 3))
    seen: list[Any] = []

    def update(key: Any, gradient: Tensor, value: Tensor) -> None:
        seen.append(key)
        value += 2 * gradient

    kv._set_updater(update)
    kv.push(3, [torch.ones(2, 3)] * 3)
    assert is_filled(pulled(kv, 3), 7) and seen == [3]


@pytest.mark.parametrize("name", ["local", "dist_sync", "dist_async"])
def test_one_process_updates_as_torchs_optimizer(name: str) -> None:
    """The second optimizer has other settings and keeps the state."""
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(LARGE))
    reference = torch.optim.SGD([parameter], lr=0.1, momentum=0.9, dampening=0.1)
    with allstep.kvstore.create(name) as kv:
        kv.init("w", parameter)
        kv.set_optimizer(reference)
        out = torch.empty(LARGE)
        for step in range(4):
            if step == 2:
                reference.param_groups[0]["lr"] = 0.01
                kv.set_optimizer(torch.optim.SGD, lr=0.01, momentum=0.9, dampening=0.1)
            parameter.grad = torch.randn(LARGE)
            kv.pushpull("w", parameter.grad, out=out)
            reference.step()
            assert torch.equal(out, parameter)


@WORKERS
def test_sync_replaces_the_value_by_the_sum_of_all_workers(ranks: Ranks, num_workers: int) -> None:
    def work() -> list[float]:
        with allstep.kvstore.create("dist_sync") as kv:
            kv.init(3, torch.full((2, 3), float(kv.rank)))
            found = [pulled(kv, 3)]
            for step in (1, 2):
                kv.push(3, torch.full((2, 3), step * 10.0**kv.rank))
                found.append(pulled(kv, 3))
            kv.push(3, torch.ones(2, 3))
            kv.push(3, [torch.ones(2, 3), torch.ones(2, 3)])
            found.append(pulled(kv, 3))
            kv._barrier()
            return [the_number(value) for value in found]

    total = sum(10.0**rank for rank in range(num_workers))
    expected = [0.0, total, 2 * total, 2.0 * num_workers]
    assert ranks(num_workers, work) == [expected] * num_workers


@WORKERS
def test_async_applies_each_push(ranks: Ranks, num_workers: int) -> None:
    def work() -> tuple[float, int]:
        with allstep.kvstore.create("Dist_Async") as kv:
            kv.init(["a", "b"], [torch.zeros(2, 3), torch.zeros(LARGE)])
            kv.set_optimizer(torch.optim.SGD, lr=1.0)
            out, before = torch.zeros(LARGE), 0.0
            for _ in range(20):
                kv.push("a", torch.full((2, 3), -1.0))
                kv.pushpull("b", torch.full(LARGE, -1.0), out=out)
                # Between two updates, and after our own.
                value = the_number(out)
                assert value > before
                before = value
            kv.barrier()
            assert the_number(pulled(kv, "b", LARGE)) == 20 * kv.num_workers
            return the_number(pulled(kv, "a")), kv.num_workers

    assert ranks(num_workers, work) == [(20.0 * num_workers, num_workers)] * num_workers


@WORKERS
@pytest.mark.parametrize("name", ["dist_sync", "dist_async", "dist_stale:2", "horovod"])
def test_what_all_stores_have(ranks: Ranks, num_workers: int, name: str) -> None:
    def work() -> None:
        kv = allstep.kvstore.create(name)
        out = torch.empty(2, 3)
        kv.broadcast(7, torch.full((2, 3), 5.0 + kv.rank), out=out)
        assert is_filled(out, 5)
        assert kv.type == name and kv.num_workers == num_workers
        assert kv.is_capable("optimizer") == (name != "horovod")
        strided = torch.empty(3, 2).t()
        parameter = nn.Parameter(torch.empty(2, 3))
        kv.pull([7], out=[[strided, parameter]])
        assert is_filled(strided, 5) and is_filled(parameter, 5)
        sparse = torch.sparse_coo_tensor(size=(2, 3), check_invariants=False)
        kv.pull(7, out=sparse)
        assert sparse._nnz() == 0
        kv.barrier()
        kv.close()
        kv.close()
        with pytest.raises(UserError, match="this kvstore is closed"):
            kv.pull(7, out=out)

    ranks(num_workers, work)


@WORKERS
def test_pushpull_without_out_replaces_the_value_pushed(ranks: Ranks, num_workers: int) -> None:
    def work() -> tuple[float, ...]:
        with allstep.kvstore.create("byteps") as kv:
            kv.init([1, 2], [torch.zeros(4), torch.zeros(2)])
            values = [torch.ones(4), torch.full((2,), 3.0)]
            kv.pushpull([1, 2], values)
            return tuple(map(the_number, values))

    assert ranks(num_workers, work) == [(num_workers, 3.0 * num_workers)] * num_workers


@pytest.mark.parametrize("name", ["local", "dist_sync", "dist_async"])
def test_rows(ranks: Ranks, name: str) -> None:
    """Row numbers may repeat, be unsorted, or be missing. The rows cross slices."""

    def work() -> None:
        value = torch.arange(700_000.0).view(-1, 7)
        with allstep.kvstore.create(name) as kv:
            kv.init("table", value)
            out = torch.sparse_coo_tensor(size=value.shape, check_invariants=False)
            kv.row_sparse_pull("table", out=out, row_ids=torch.tensor([99_999, 3, 37_449, 3]))
            rows = [3, 37_449, 99_999]
            assert out._indices().tolist() == [rows]
            assert torch.equal(out._values(), value[rows])
            kv.row_sparse_pull("table", out=out, row_ids=[])
            assert out._nnz() == 0
            outs = [torch.sparse_coo_tensor(size=value.shape, check_invariants=False)] * 2
            kv.row_sparse_pull("table", out=outs, row_ids=[torch.tensor([1]), torch.tensor([2])])
            assert outs[1]._indices().tolist() == [[2]]

    ranks(1 if name == "local" else 2, work)


def test_several_stores_and_later_keys(ranks: Ranks) -> None:
    """Keys come after the optimizer and before; the first store to close ends no other."""

    def work() -> list[float]:
        first, second = allstep.kvstore.create("dist_async"), allstep.kvstore.create("dist_sync")
        for kv in (first, second):
            kv.init("a", torch.zeros(5))
            kv.set_optimizer(torch.optim.SGD, lr=1.0)
            kv.init(["b", "c"], [torch.zeros(3), torch.zeros(())])
        first.close()
        for key, shape in {"a": (5,), "b": (3,), "c": ()}.items():
            second.pushpull(key, torch.ones(shape), out=torch.empty(shape))
        return [the_number(pulled(second, key, s)) for key, s in {"a": (5,), "c": ()}.items()]

    assert ranks(2, work) == [[-2.0, -2.0]] * 2


def test_the_worker_that_ends_first_stops_no_other(ranks: Ranks) -> None:
    """With MXNet, the end of worker 0 stops the servers (mxnet #2412)."""

    def work() -> float:
        kv = allstep.kvstore.create("dist_async")
        kv.init(1, torch.zeros(4))
        kv.set_optimizer(torch.optim.SGD, lr=1.0)
        if kv.rank == 0:
            return 0.0
        kv.barrier()
        for _ in range(100):
            kv.push(1, torch.ones(4))
        return the_number(pulled(kv, 1, (4,)))

    assert ranks(2, work) == [0.0, -100.0]


def test_half_precision_keeps_master_weights(ranks: Ranks) -> None:
    """Steps that bfloat16 would round away add up in float32, in both modes."""

    def work(name: str) -> list[float]:
        with allstep.kvstore.create(name) as kv:
            kv.init([1, 2], [torch.ones(4, dtype=torch.bfloat16), torch.ones(3)])
            kv.set_optimizer(torch.optim.SGD, lr=1e-3, multi_precision=True)
            out = torch.empty(4, dtype=torch.bfloat16)
            for _ in range(50):
                kv.pushpull(1, torch.ones(4, dtype=torch.bfloat16), out=out)
            kv.barrier()
            kv.pull(1, out=out)
            return out.tolist()

    expected = torch.tensor(1 - 100 * 1e-3).to(torch.bfloat16).item()
    for name in ("dist_sync", "dist_async"):
        assert ranks(2, work, name) == [[expected] * 4] * 2


def test_a_forked_child_does_not_close_the_store(ranks: Ranks) -> None:
    """As a worker process of a DataLoader, which drops its copy of everything at its end."""

    def work() -> float:
        kv = allstep.kvstore.create("dist_sync")
        kv.init(1, torch.zeros(4))
        if kv.rank == 0:
            child = os.fork()
            if child == 0:
                kv.close()
                os._exit(0)
            os.waitpid(child, 0)
        kv.barrier()
        kv.push(1, torch.ones(4))
        return the_number(pulled(kv, 1, (4,)))

    assert ranks(2, work) == [2.0, 2.0]


def test_a_store_ends_with_the_world_in_which_it_was_made(ranks: Ranks) -> None:
    def work() -> list[float]:
        found = []
        for _ in range(2):
            world = allstep.init()
            kv = allstep.kvstore.create("dist_sync")
            assert (kv.rank, kv.num_workers) == (world.rank, world.size)
            kv.init(1, torch.zeros(4))
            kv.push(1, torch.ones(4))
            found.append(the_number(pulled(kv, 1, (4,))))
            kv.barrier()
            allstep.shutdown()
            with pytest.raises(UserError, match="this kvstore is closed"):
                kv.barrier()
        return found

    assert ranks(2, work) == [[2.0, 2.0]] * 2
