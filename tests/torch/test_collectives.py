"""Every collective on 1, 2 and 3 ranks, against what plain torch computes from the same numbers in
one process.

Inputs are drawn from the rank, so that each rank knows those of all. They are small whole numbers:
sums are exact in any order.
"""

import threading
from functools import reduce
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import allstep.torch as hvd
from allstep.torch import mpi_ops
from support.hvd_ranks import in_worlds, run_checks, running
from support.ranks import Ranks

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]


def draw(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(1000 + rank)
    return torch.randint(1, 4, shape, generator=generator).to(dtype)


def same(result: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(result, expected, rtol=0, atol=0)


def drawn(size: int, *shape: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [draw(rank, *shape, dtype=dtype) for rank in range(size)]


@in_worlds
def test_reducing(ranks: Ranks, hosts: list[str]) -> None:
    run_checks(ranks, hosts, reduce_all, say_average, reduce_groups, reduce_sparse)


@in_worlds
def test_moving_and_meeting(ranks: Ranks, hosts: list[str]) -> None:
    run_checks(ranks, hosts, move, hold_handles, run_out_of_data)


def reduce_all(rank: int, size: int) -> None:
    for dtype in [*FLOATS, *INTS]:
        for shape in [(), (0,), (5,), (3, 4)]:
            all_of_them = drawn(size, *shape, dtype=dtype)
            mine, total = all_of_them[rank].clone(), sum(all_of_them)
            same(hvd.allreduce(mine, op=hvd.Sum), total)
            same(hvd.allreduce(mine, op=hvd.Min), reduce(torch.minimum, all_of_them))
            same(hvd.allreduce(mine, op=hvd.Max), reduce(torch.maximum, all_of_them))
            same(hvd.allreduce(mine, op=hvd.Product), reduce(torch.mul, all_of_them))
            same(mine, all_of_them[rank])  # the input is left alone
            average = hvd.allreduce(mine)
            if not dtype.is_floating_point:  # multiplied in float64, cut off towards zero
                same(average, (total.double() * (1.0 / size)).to(dtype))
            elif dtype.itemsize >= 4:
                torch.testing.assert_close(average, total / size)
            in_place = mine.clone()
            assert hvd.allreduce_(in_place, op=hvd.Sum) is in_place
            same(in_place, total)
    same(
        hvd.allreduce(torch.tensor([rank == 0, False]), op=hvd.Sum), torch.tensor([True, False])
    )  # bool, which Horovod has not
    scaled = hvd.allreduce(torch.ones(4), op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.5)
    same(scaled, torch.full((4,), float(size)))
    same(
        hvd.allreduce(torch.tensor([-7]), op=hvd.Max, prescale_factor=0.5), torch.tensor([-3])
    )  # towards zero
    for two in (np.float64(2), np.float32(2), 2, torch.tensor(2.0)):  # all of which scripts pass
        same(
            hvd.allreduce(torch.ones(1), op=hvd.Sum, prescale_factor=two),
            torch.full((1,), 2.0 * size),
        )
    same(hvd.broadcast(torch.tensor([rank]), np.int64(0)), torch.tensor([0]))
    strided = draw(rank, 4, 6).t()[::2]
    same(hvd.allreduce(strided, op=hvd.Sum), sum(each.t()[::2] for each in drawn(size, 4, 6)))
    same(hvd.allreduce_(strided, op=hvd.Sum), sum(each.t()[::2] for each in drawn(size, 4, 6)))
    leaf = torch.ones(3, requires_grad=True)  # a leaf that autograd watches may be written to
    assert hvd.allreduce_(leaf, op=hvd.Sum) is leaf
    assert leaf.tolist() == [size] * 3
    assert leaf.requires_grad and leaf.grad_fn is None
    for dtype in (torch.float32, torch.int64):
        half = hvd.allreduce(
            torch.full((3,), 2, dtype=dtype),
            op=hvd.Sum,
            compression=hvd.Compression.fp16,
            name=str(dtype),
        )
        same(half, torch.full((3,), 2 * size, dtype=dtype))


def say_average(rank: int, size: int) -> None:
    for name, call in [("allreduce", hvd.allreduce), ("in place", hvd.allreduce_)]:
        with pytest.warns(DeprecationWarning, match="average"):
            assert call(torch.ones(1), average=False, name=name).item() == size
        with pytest.warns(DeprecationWarning, match="average"):
            assert call(torch.ones(1), average=True, name=name).item() == 1
    with pytest.raises(ValueError, match="supersedes average"):
        hvd.allreduce(torch.ones(1), average=True, op=hvd.Average)
    with pytest.raises(ValueError, match="Product=5"):
        hvd.allreduce(torch.ones(1), op=9)


def reduce_groups(rank: int, size: int) -> None:
    shapes, dtypes = [(2,), (3, 4), ()], [torch.float32, torch.int64, torch.float64]
    mine = [draw(rank, *shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    totals = [
        sum(drawn(size, *shape, dtype=dtype)) for shape, dtype in zip(shapes, dtypes, strict=True)
    ]
    result = hvd.grouped_allreduce(mine, op=hvd.Sum, name="group", compression=hvd.Compression.bf16)
    assert isinstance(result, list)
    handle = hvd.grouped_allreduce_async(mine, op=hvd.Sum)
    later = hvd.synchronize(handle)
    assert isinstance(later, tuple)
    in_place = [each.clone() for each in mine]
    there = hvd.grouped_allreduce_(in_place, op=hvd.Sum)
    assert isinstance(there, tuple) and all(a is b for a, b in zip(there, in_place, strict=True))
    for results in (result, later, there):
        for each, total in zip(results, totals, strict=True):
            same(each, total)
    gathered = hvd.grouped_allgather([draw(rank, rank, 2), draw(rank, 1)], name="gather")
    assert isinstance(gathered, tuple)
    same(gathered[0], torch.cat([draw(each, each, 2) for each in range(size)]))
    same(gathered[1], torch.cat(drawn(size, 1)))
    scattered = hvd.grouped_reducescatter([draw(rank, size, 2), draw(rank, 2 * size)], op=hvd.Sum)
    assert isinstance(scattered, list)
    same(scattered[0], sum(drawn(size, size, 2))[rank : rank + 1])
    same(scattered[1], sum(drawn(size, 2 * size))[2 * rank : 2 * rank + 2])
    assert isinstance(hvd.synchronize(hvd.grouped_reducescatter_async([torch.ones(size)])), tuple)
    assert isinstance(hvd.synchronize(hvd.grouped_allgather_async([torch.ones(1)])), tuple)
    for call in (hvd.grouped_allreduce, hvd.grouped_allgather, hvd.grouped_reducescatter):
        with pytest.raises(ValueError, match="at least one tensor"):
            call([])


def move(rank: int, size: int) -> None:
    for dtype in [*FLOATS, *INTS, torch.bool]:
        mine = draw(rank, rank + 1, 3, dtype=dtype)
        same(
            hvd.allgather(mine),
            torch.cat([draw(each, each + 1, 3, dtype=dtype) for each in range(size)]),
        )
        root = size - 1
        given = draw(rank, 2, 3, dtype=dtype)
        same(hvd.broadcast(given, root), draw(root, 2, 3, dtype=dtype))
        same(given, draw(rank, 2, 3, dtype=dtype))
        assert hvd.broadcast_(given, root) is given
        same(given, draw(root, 2, 3, dtype=dtype))
        same(hvd.broadcast(draw(rank, dtype=dtype), 0), draw(0, dtype=dtype))
        even = draw(rank, 2 * size, 2, dtype=dtype)
        same(
            hvd.alltoall(even),
            torch.cat(
                [each[2 * rank : 2 * rank + 2] for each in drawn(size, 2 * size, 2, dtype=dtype)]
            ),
        )
    same(hvd.allgather(torch.ones(0 if rank else 2, 3)), torch.ones(2, 3))  # no rows here
    assert hvd.allgather(torch.ones(0, 3)).shape == (0, 3)
    scatter(rank, size)
    deal(rank, size)


def scatter(rank: int, size: int) -> None:
    rows = 2 * size + 1  # the first rank gets one more
    share = slice(0, 3) if rank == 0 else slice(2 * rank + 1, 2 * rank + 3)
    mine, total = draw(rank, rows, 2), sum(drawn(size, rows, 2))
    same(hvd.reducescatter(mine, op=hvd.Sum), total[share])
    torch.testing.assert_close(hvd.reducescatter(mine), total[share] / size)
    same(
        hvd.reducescatter(mine, op=hvd.Sum, prescale_factor=4.0, postscale_factor=0.5),
        2 * total[share],
    )
    same(hvd.reducescatter(mine, op=hvd.Sum, compression=hvd.Compression.fp16), total[share])
    assert hvd.reducescatter(torch.ones(1, 2), op=hvd.Sum).shape[0] == (1 if rank == 0 else 0)


def deal(rank: int, size: int) -> None:
    """Rank r sends i + 1 rows to rank i, and keeps one that it sends nobody."""
    splits = list(range(1, size + 1))
    values = torch.arange(sum(splits) + 1) + 100 * rank
    start = sum(splits[:rank])
    expected = torch.cat(
        [torch.arange(start, start + rank + 1) + 100 * each for each in range(size)]
    )
    for given in (splits, tuple(splits), torch.tensor(splits, dtype=torch.int32)):
        output, received = hvd.alltoall(values, splits=given)
        same(output, expected)
        same(received, torch.full((size,), rank + 1, dtype=torch.int32))
    output, received = hvd.synchronize(hvd.alltoall_async(values[: 2 * size]))
    assert received.tolist() == [2] * size
    assert isinstance(hvd.alltoall(values[: 2 * size]), Tensor)
    output, received = hvd.alltoall(values[: 2 * size], splits=torch.empty(0, dtype=torch.int32))
    assert received.tolist() == [2] * size


def hold_handles(rank: int, size: int) -> None:
    names = [f"tensor {number}" for number in range(20)]
    order = names if rank else names[::-1]  # ranks ask in different orders
    handles = {
        name: hvd.allreduce_async(
            torch.full((50_000,), float(names.index(name))), name=name, op=hvd.Sum
        )
        for name in order
    }
    assert all(isinstance(handle, int) for handle in handles.values())
    assert set(handles.values()) <= set(mpi_ops._handle_map) and all(
        mpi_ops._handle_map[each] for each in handles.values()
    )
    late = hvd.allreduce_async(torch.ones(1), name="late") if rank == 0 else None
    if late is not None and size > 1:
        assert not hvd.poll(late)  # the others ask for it only after the barrier
    hvd.barrier()
    hvd.synchronize(late if late is not None else hvd.allreduce_async(torch.ones(1), name="late"))
    for name, handle in handles.items():
        assert hvd.synchronize(handle)[-1].item() == names.index(name) * size
    for handle in handles.values():
        assert hvd.synchronize(handle) is None  # freed
        assert handle not in mpi_ops._handle_map
        with pytest.raises(ValueError, match="not created or has been cleared"):
            hvd.poll(handle)
    handle = hvd.broadcast_async_(torch.ones(2), 0)
    while not hvd.poll(handle):
        pass
    same(hvd.synchronize(handle), torch.ones(2))
    one_name = [
        call(torch.ones(size), name="shared")
        for call in (hvd.allreduce_async, hvd.allgather_async, hvd.alltoall_async)
    ]
    assert [hvd.synchronize(each) is not None for each in one_name] == [True] * 3
    ask_from_threads(size)


def ask_from_threads(size: int) -> None:
    results: dict[int, float] = {}

    def ask(number: int) -> None:
        results[number] = hvd.allreduce(
            torch.tensor(float(number)), op=hvd.Sum, name=f"thread {number}"
        ).item()

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {number: number * size for number in range(8)}


def reduce_sparse(rank: int, size: int) -> None:

    def rows(of: int) -> Tensor:
        return torch.sparse_coo_tensor(
            torch.tensor([[0, of + 1]]), draw(of, 2, 3), (5, 3), check_invariants=True
        )

    total = sum(rows(each).to_dense() for each in range(size))
    for op, divisor in [(hvd.Sum, 1), (hvd.Average, size)]:
        wait = hvd.sparse_allreduce_async(rows(rank), name=f"sparse {op}", op=op)
        result = wait()
        assert result.is_sparse and not result.is_coalesced()
        torch.testing.assert_close(result.to_dense(), total / divisor)
    nothing = torch.sparse_coo_tensor(
        torch.empty(1, 0, dtype=torch.int64), torch.empty(0, 3), (5, 3), check_invariants=True
    )
    same(hvd.sparse_allreduce_async(nothing, "empty", hvd.Sum)().to_dense(), torch.zeros(5, 3))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_adasum(ranks: Ranks, size: int) -> None:
    ranks(size, add_adaptively)


def add_adaptively() -> None:
    with running() as (rank, size):
        orthogonal = torch.zeros(8)
        orthogonal[rank] = 3.0
        same(
            hvd.allreduce(orthogonal, op=hvd.Adasum),
            torch.tensor([3.0] * size + [0.0] * (8 - size)),
        )
        parallel = torch.full((5,), float(rank + 1), dtype=torch.float64)
        expected = torch.full((5,), (size + 1) / 2, dtype=torch.float64)
        torch.testing.assert_close(hvd.allreduce(parallel, op=hvd.Adasum), expected)
        assert hvd.allreduce_(parallel, op=hvd.Adasum) is parallel
        torch.testing.assert_close(parallel, expected)


def run_out_of_data(rank: int, size: int) -> None:
    """Rank r has r + 1 batches. An average still divides by all ranks."""
    for batch in range(rank + 1):
        here = size - batch  # ranks that still have data
        assert hvd.allreduce(torch.ones(3), op=hvd.Sum, name=f"sum {batch}").tolist() == [here] * 3
        torch.testing.assert_close(
            hvd.allreduce(torch.ones(2), name=f"mean {batch}"), torch.full((2,), here / size)
        )
    assert hvd.join() == size - 1
    hvd.barrier()
    same(hvd.allgather(torch.tensor([rank]), name="after"), torch.arange(size))  # all is well again
    pending = hvd.allreduce_async(torch.ones(1), name="pending") if rank else None
    hvd.barrier()  # does not wait for it
    if rank == 0:
        hvd.allreduce(torch.ones(1), name="pending")
    elif pending is not None:
        hvd.synchronize(pending)


def test_torchs_default_group_is_left_alone(ranks: Ranks) -> None:
    ranks(2, use_both)


def use_both() -> None:
    with running() as (rank, size):
        assert not dist.is_initialized()
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(str(Path("../store").resolve()), size),
            rank=rank,
            world_size=size,
        )
        number = torch.ones(1)
        dist.all_reduce(number)
        same(hvd.allreduce(torch.ones(1), op=hvd.Sum), number)
        dist.destroy_process_group()
        same(hvd.allreduce(torch.ones(1), op=hvd.Sum), number)
