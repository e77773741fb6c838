"""The engine on real ranks: every kind of operation in any order, mistakes and mismatches, groups,
join, process sets, threads, forks."""

import importlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from allstep import engine
from allstep.engine import DuplicateName, Engine, EngineStopped, Kind, Op, Request
from allstep.errors import CollectiveMismatch, CollectiveTimeout, CommError
from support.ranks import Ranks, wait_until


@contextmanager
def running(**options: Any) -> Iterator[tuple[Engine, int, int]]:
    """The engine, our rank and the number of ranks.

    Nobody leaves before all have come to the end.
    """
    started = engine.start(**options)
    yield started, started.world.rank, started.world.size
    started.perform(Request(Kind.BARRIER))
    started.shutdown()


def allreduce(tensor: torch.Tensor, name: str = "allreduce.x", **more: Any) -> Request:
    return Request(Kind.ALLREDUCE, name, tensor, **more)


def raised(kind: type[BaseException], act: Callable[[], Any]) -> str:
    with pytest.raises(kind) as caught:
        act()
    assert type(caught.value) is kind
    return str(caught.value)


# Every kind


def every_kind() -> None:
    with running() as (e, rank, size):
        assert (e.world.rank, e.process_sets) == (rank, {0: tuple(range(size))})
        mine, total = torch.arange(6.0).view(2, 3) + rank, sum(range(size))
        copy = mine.clone()
        everyone = torch.arange(6.0).view(2, 3) * size + total
        assert torch.equal(e.perform(allreduce(mine, op=Op.SUM)), everyone)
        assert torch.equal(e.perform(allreduce(mine)), everyone / size)
        assert torch.equal(e.perform(allreduce(mine, op=Op.MIN)), mine - rank)
        assert torch.equal(e.perform(allreduce(mine, op=Op.MAX)), mine - rank + size - 1)
        assert torch.equal(e.perform(allreduce(mine.t(), op=Op.SUM)), everyone.t())
        product = torch.full((2,), 2.0)
        assert e.perform(allreduce(product, op=Op.PRODUCT)).tolist() == [2.0**size] * 2
        assert e.perform(allreduce(torch.tensor(1.0), op=Op.SUM)).item() == size
        assert e.perform(allreduce(torch.empty(0, 3))).shape == (0, 3)
        large = torch.full((300_000,), float(rank))
        assert torch.equal(
            e.perform(allreduce(large, op=Op.SUM)), torch.full((300_000,), float(total))
        )

        rows = torch.full((rank, 2), float(rank))  # rank 0 has none
        expected = torch.cat([torch.full((each, 2), float(each)) for each in range(size)])
        assert torch.equal(e.perform(Request(Kind.ALLGATHER, "allgather.x", rows)), expected)
        uneven = torch.full((rank + 1,), rank, dtype=torch.int16)
        gathered = e.perform(Request(Kind.ALLGATHER, "allgather.x", uneven))
        assert gathered.tolist() == [each for each in range(size) for _ in range(each + 1)]
        assert e.perform(
            Request(Kind.ALLGATHER, "allgather.x", torch.tensor([rank]))
        ).tolist() == list(range(size))

        for root in range(size):
            assert torch.equal(
                e.perform(Request(Kind.BROADCAST, "broadcast.x", mine, root=root)),
                copy - rank + root,
            )

        splits = tuple((rank + to) % 3 for to in range(size))
        given = torch.cat(
            [torch.full((count,), 10 * rank + to) for to, count in enumerate(splits)]
            + [torch.ones(2)]
        )
        output, received = e.perform(Request(Kind.ALLTOALL, "alltoall.x", given, splits=splits))
        counts = [(each + rank) % 3 for each in range(size)]
        assert received.tolist() == counts and received.dtype == torch.int32
        assert output.tolist() == [
            10 * each + rank for each, count in enumerate(counts) for _ in range(count)
        ]
        output, received = e.perform(Request(Kind.ALLTOALL, "alltoall.x", torch.arange(2 * size)))
        assert (
            output.tolist() == [2 * rank, 2 * rank + 1] * size and received.tolist() == [2] * size
        )
        output, _ = e.perform(Request(Kind.ALLTOALL, "alltoall.x", torch.empty(0, 3)))
        assert output.shape == (0, 3)

        for num_rows in (1, size + 1, 7):
            summed = torch.arange(2.0 * num_rows).view(num_rows, 2)
            cut = [num_rows // size + (each < num_rows % size) for each in range(size)]
            expected = torch.split(summed * size, cut)[rank]
            request = Request(Kind.REDUCESCATTER, "reducescatter.x", summed, op=Op.SUM)
            assert torch.equal(e.perform(request), expected)
            average = Request(
                Kind.REDUCESCATTER, "reducescatter.x", summed, prescale=2.0, postscale=0.5
            )
            assert torch.equal(e.perform(average), expected / size)

        assert e.perform(Request(Kind.BARRIER)) is None
        assert e.perform(Request(Kind.JOIN)) in range(size)
        assert torch.equal(mine, copy)  # nothing wrote into what was given


@pytest.mark.parametrize("hosts", [["a"], ["a", "a"], ["a", "a", "a"], ["a", "a", "b"]])
def test_every_kind(ranks: Ranks, hosts: list[str]) -> None:
    ranks(len(hosts), every_kind, hosts=hosts)


def arithmetic() -> None:
    """As Horovod computes it: factors on integers in float64, cut off; on halves in float32,
    rounded once."""
    with running() as (e, rank, size):
        ints = torch.tensor([7, -7, 2**40 + 1]) + rank
        total = ints * size - size * rank + sum(range(size))
        expected = [int(float(value) * (1.0 / size)) for value in total.tolist()]
        assert e.perform(allreduce(ints)).tolist() == expected
        small = torch.tensor([5, -5], dtype=torch.int32)
        scaled = e.perform(allreduce(small, op=Op.SUM, prescale=0.5, postscale=1.5))
        assert (
            scaled.tolist() == [int(2 * size * 1.5), -int(2 * size * 1.5)]
            and scaled.dtype == torch.int32
        )
        assert e.perform(allreduce(small, op=Op.MAX, postscale=0.3)).tolist() == [1, -1]
        for half in (torch.float16, torch.bfloat16):
            values = torch.tensor([1.0, 3.0, 100.0], dtype=half)
            result = e.perform(allreduce(values, op=Op.SUM, postscale=0.1))
            assert torch.equal(result, ((values * size).float() * 0.1).to(half))
        bools = e.perform(allreduce(torch.tensor([rank == 0, False]), op=Op.SUM))
        assert bools.tolist() == [True, False]
        bytes_ = torch.tensor([200], dtype=torch.uint8)
        assert e.perform(allreduce(bytes_, op=Op.SUM)).item() == 200 * size % 256
        turned = e.perform(allreduce(torch.tensor([1 + 2j]), op=Op.SUM))
        assert turned.tolist() == [(1 + 2j) * size]


@pytest.mark.parametrize("size", [1, 3])
def test_arithmetic(ranks: Ranks, size: int) -> None:
    ranks(size, arithmetic)


def in_place() -> None:
    with running() as (e, rank, size):
        weight = torch.nn.Parameter(torch.full((2, 2), float(rank)))
        version = weight._version
        result = e.perform(allreduce(weight, output=weight, op=Op.SUM))
        assert result is weight and weight.tolist() == [[float(sum(range(size)))] * 2] * 2
        strided = torch.full((3, 4), float(rank)).t()
        assert (
            e.perform(Request(Kind.BROADCAST, "broadcast.x", strided, strided, root=size - 1))
            is strided
        )
        assert strided.tolist() == [[size - 1.0] * 3] * 4
        assert e.perform(Request(Kind.BROADCAST, "broadcast.x", weight, weight, root=0)) is weight
        assert e.perform(allreduce(strided, output=strided, op=Op.SUM)) is strided
        assert strided.tolist() == [[(size - 1.0) * size] * 3] * 4
        assert weight._version == version
        other = torch.zeros(2, 2)
        assert e.perform(allreduce(weight, output=other, op=Op.MAX)) is other and torch.equal(
            other, weight.detach()
        )


def test_in_place(ranks: Ranks) -> None:
    ranks(2, in_place)


def adasum() -> None:
    from allstep.engine.adasum import pair

    with running() as (e, rank, size):
        torch.manual_seed(0)
        given = [torch.randn(1000, dtype=torch.float64) for _ in range(size)]
        level = given
        while len(level) > 1:
            level = [pair(*level[at : at + 2]) for at in range(0, len(level), 2)]
        result = e.perform(Request(Kind.ADASUM, "allreduce.x", given[rank], op=Op.ADASUM))
        assert torch.equal(result, level[0])
        parallel = torch.tensor([1.0, -2.0]) * (rank + 1)
        mean = torch.tensor([1.0, -2.0]) * sum(range(1, size + 1)) / size
        if size == 2:  # the mean of means otherwise
            assert torch.allclose(e.perform(Request(Kind.ADASUM, "", parallel, op=Op.ADASUM)), mean)
        orthogonal = torch.eye(size)[rank].half()
        scaled = e.perform(
            Request(Kind.ADASUM, "", orthogonal, op=Op.ADASUM, prescale=2.0, postscale=3.0)
        )
        assert scaled.tolist() == [6.0] * size and scaled.dtype == torch.float16


@pytest.mark.parametrize("hosts", [["a"], ["a", "a"], ["a", "a", "b", "b"]])
def test_adasum(ranks: Ranks, hosts: list[str]) -> None:
    ranks(len(hosts), adasum, hosts=hosts)


# Handles and names


def handles() -> None:
    with running() as (e, rank, size):
        names = [f"allreduce.{index}" for index in range(20)]
        order = names if rank == 0 else names[::-1]
        found = {
            name: e.enqueue(allreduce(torch.tensor([float(names.index(name))]), name, op=Op.SUM))
            for name in order
        }
        assert sorted(found.values()) == list(range(1, 21))
        for name in names if rank else names[::-1]:
            assert e.synchronize(found[name]).item() == names.index(name) * size
        assert e.synchronize(found["allreduce.3"]) is None
        assert e.synchronize(12345) is None
        assert "handle 3 was not created or has been cleared" in raised(
            ValueError, lambda: e.poll(3)
        )
        for _ in range(20):
            last = e.enqueue(
                allreduce(torch.ones(1), "")
            )  # the first is called allreduce.noname.21
            while not e.poll(last):
                pass
            assert e.synchronize(last).item() == 1.0
        assert last == 40
        if rank == 0:
            raised(ValueError, lambda: e.enqueue(allreduce(torch.zeros(2).to_sparse())))
            assert e.enqueue(Request(Kind.BARRIER)) == 42  # a failed one has used a number
            e.synchronize(42)
        else:
            e.perform(Request(Kind.BARRIER))


def the_others_are_late() -> None:
    with running() as (e, rank, size):
        if rank == 0:
            handle = e.enqueue(allreduce(torch.ones(1), op=Op.SUM))
            assert not e.poll(
                handle
            )  # the others enqueue it after the barrier, which rank 0 enters after this line
            e.perform(Request(Kind.BARRIER))
        else:
            e.perform(Request(Kind.BARRIER))
            handle = e.enqueue(allreduce(torch.ones(1), op=Op.SUM))
        assert e.synchronize(handle).item() == size


@pytest.mark.parametrize("hosts", [["a"], ["a", "a"], ["a", "b"]])
def test_handles(ranks: Ranks, hosts: list[str]) -> None:
    ranks(len(hosts), handles, hosts=hosts)


@pytest.mark.parametrize("hosts", [["a", "a"], ["a", "b"]])
def test_enqueue_does_not_wait_for_the_others(ranks: Ranks, hosts: list[str]) -> None:
    ranks(len(hosts), the_others_are_late, hosts=hosts)


def a_name_twice() -> None:
    with running() as (e, rank, _):
        if rank == 0:
            first = e.enqueue(allreduce(torch.ones(2), op=Op.SUM))
            words = raised(DuplicateName, lambda: e.enqueue(allreduce(torch.zeros(3))))
            assert "same name as another tensor" in words and "allreduce.x" in words
            pair = [allreduce(torch.zeros(1), "allreduce.y"), allreduce(torch.zeros(3))]
            raised(DuplicateName, lambda: e.enqueue_group(pair))
            raised(DuplicateName, lambda: e.enqueue_group(pair[:1] * 2))
            e.enqueue(Request(Kind.ALLGATHER, "allgather.x", torch.ones(1)))  # another full name
            e.perform(Request(Kind.BARRIER))
            assert e.synchronize(first).tolist() == [2.0, 2.0]
        else:
            e.enqueue(Request(Kind.ALLGATHER, "allgather.x", torch.ones(1)))
            e.perform(Request(Kind.BARRIER))  # not held up by what rank 0 has under way
            assert e.perform(allreduce(torch.ones(2), op=Op.SUM)).tolist() == [2.0, 2.0]


def test_a_name_twice(ranks: Ranks) -> None:
    ranks(2, a_name_twice)


def groups() -> None:
    with running() as (e, rank, size):
        tensors = [
            torch.full((3,), float(rank)),
            torch.full((2, 2), rank, dtype=torch.int64),
            torch.full((1,), 0.5),
        ]
        requests = [
            allreduce(tensor, f"grouped_allreduce.x_{k}of3", op=Op.SUM)
            for k, tensor in enumerate(tensors, 1)
        ]
        total = sum(range(size))
        result = e.synchronize(e.enqueue_group(requests))
        assert type(result) is tuple
        assert [each.tolist() for each in result] == [[total] * 3, [[total] * 2] * 2, [0.5 * size]]
        unnamed = [Request(Kind.ALLGATHER, "", torch.tensor([rank])) for _ in range(2)]
        assert [each.tolist() for each in e.synchronize(e.enqueue_group(unnamed))] == [
            list(range(size))
        ] * 2
        scattered = [
            Request(Kind.REDUCESCATTER, "", torch.ones(size, 2), op=Op.SUM) for _ in range(2)
        ]
        assert [each.tolist() for each in e.synchronize(e.enqueue_group(scattered))] == [
            [[size] * 2]
        ] * 2
        assert e.synchronize(e.enqueue_group([])) == ()
        wrong = [allreduce(torch.ones(2), "a"), allreduce(torch.ones(2 + rank), "b")]
        assert "tensor shapes" in raised(
            CollectiveMismatch, lambda: e.synchronize(e.enqueue_group(wrong))
        )


@pytest.mark.parametrize("hosts", [["a", "a"], ["a", "b"]])
def test_groups(ranks: Ranks, hosts: list[str]) -> None:
    ranks(len(hosts), groups, hosts=hosts)


def one_group_at_a_time() -> None:
    """Half of a group is not done before the other half."""
    with running() as (e, rank, _):
        if rank == 0:
            both = e.enqueue_group([allreduce(torch.ones(1), "a"), allreduce(torch.ones(1), "b")])
            e.perform(Request(Kind.BARRIER))
            e.synchronize(both)
        else:
            first = e.enqueue(allreduce(torch.ones(1), "a"))
            e.perform(Request(Kind.BARRIER))
            assert not e.poll(first)
            e.perform(allreduce(torch.ones(1), "b"))
            assert e.synchronize(first).item() == 1.0


def test_one_group_at_a_time(ranks: Ranks) -> None:
    ranks(2, one_group_at_a_time)


# Mistakes


def mismatches() -> list[str]:
    """Each reaches all ranks, and the engine works after it."""
    with running() as (e, rank, size):
        odd = rank == size - 1
        pairs = [
            (allreduce(torch.zeros(2)), allreduce(torch.zeros(2).double())),
            (allreduce(torch.zeros(2), "x"), Request(Kind.BROADCAST, "x", torch.zeros(2))),
            (allreduce(torch.zeros(17, 17)), allreduce(torch.zeros(2))),
            (
                Request(Kind.BROADCAST, "x", torch.zeros(2)),
                Request(Kind.BROADCAST, "x", torch.zeros(3)),
            ),
            (
                Request(Kind.REDUCESCATTER, "x", torch.zeros(2)),
                Request(Kind.REDUCESCATTER, "x", torch.zeros(3)),
            ),
            (
                Request(Kind.ALLGATHER, "x", torch.zeros(2)),
                Request(Kind.ALLGATHER, "x", torch.zeros(2, 2)),
            ),
            (
                Request(Kind.ALLGATHER, "x", torch.zeros(2, 3)),
                Request(Kind.ALLGATHER, "x", torch.zeros(2, 2)),
            ),
            (
                Request(Kind.ALLTOALL, "x", torch.zeros(6, 3)),
                Request(Kind.ALLTOALL, "x", torch.zeros(6, 2)),
            ),
            (allreduce(torch.zeros(2), prescale=2.0), allreduce(torch.zeros(2))),
            (allreduce(torch.zeros(2), op=Op.SUM), allreduce(torch.zeros(2), op=Op.MIN)),
            (
                Request(Kind.BROADCAST, "x", torch.zeros(2)),
                Request(Kind.BROADCAST, "x", torch.zeros(2), root=1),
            ),
            (
                Request(Kind.ALLGATHER, "x", torch.tensor(1.0)),
                Request(Kind.ALLGATHER, "x", torch.tensor(1.0)),
            ),
        ]
        words = []
        for pair in pairs:
            request = pair[odd]
            words.append(raised(CollectiveMismatch, lambda request=request: e.perform(request)))
            assert e.perform(allreduce(torch.ones(2), op=Op.SUM)).tolist() == [size, size]
        return words


@pytest.mark.parametrize("hosts", [["a", "a", "a"], ["a", "b"]])
def test_mismatches(ranks: Ranks, hosts: list[str]) -> None:
    found = ranks(len(hosts), mismatches, hosts=hosts)
    assert all(words == found[0] for words in found)
    expected = [
        "Mismatched data types",
        "Mismatched operations",
        "Mismatched ALLREDUCE tensor shapes: rank 0 sent a tensor of shape [17, 17], but",
        "Mismatched BROADCAST tensor shapes",
        "Mismatched REDUCESCATTER tensor shapes",
        "tensor of rank",
        "with dimension",
        "Mismatched ALLTOALL tensor shapes",
        "prescale and/or postscale",
        "reduction operation",
        "root ranks",
        "rank zero",
    ]
    for words, text in zip(found[0], expected, strict=True):
        assert text in words


def mistakes_of_one_rank() -> None:
    """Nobody else hears of them."""
    with running(process_sets=[[0]]) as (e, rank, _):
        if rank == 1:
            assert "rank 1 is not a member of process set 1 ([0])" in raised(
                ValueError, lambda: e.enqueue(allreduce(torch.ones(1), process_set=1))
            )
            for kind in (Kind.ALLREDUCE, Kind.REDUCESCATTER):
                words = raised(
                    ValueError,
                    lambda k=kind: e.enqueue(Request(k, "", torch.ones(1), process_set=9)),
                )
                assert (
                    "Invalid process set id 9" in words
                    and "does not exist, or has not been registered" in words
                )
            assert "invalid root rank 2" in raised(
                ValueError, lambda: e.enqueue(Request(Kind.BROADCAST, "x", torch.ones(1), root=2))
            )
            raised(ValueError, lambda: e.enqueue(Request(Kind.ALLTOALL, "x", torch.ones(3))))
            raised(
                CommError,
                lambda: e.enqueue(Request(Kind.REDUCESCATTER, "x", torch.ones(3), op=Op.MAX)),
            )
        assert e.perform(allreduce(torch.ones(1), op=Op.SUM)).item() == 2.0


def test_mistakes_of_one_rank(ranks: Ranks) -> None:
    ranks(2, mistakes_of_one_rank)


# Join


def joins() -> list[Any]:
    """Rank r has r + 1 batches; the others go on without those who are through."""
    with running() as (e, rank, _):
        sums = []
        for step in range(rank + 1):
            handles = [
                e.enqueue(allreduce(torch.full((2,), 1.0 + step), "allreduce.a", op=Op.SUM)),
                e.enqueue(allreduce(torch.ones(2), "allreduce.average")),
                e.enqueue(allreduce(torch.ones(1), f"allreduce.min{step}", op=Op.MIN)),
                e.enqueue(
                    allreduce(
                        torch.ones(3, dtype=torch.int32), "allreduce.int", op=Op.SUM, prescale=3.0
                    )
                ),
            ]
            sums.append([e.synchronize(handle).tolist()[0] for handle in handles])
        last = e.perform(Request(Kind.JOIN))
        again = e.perform(allreduce(torch.ones(1), op=Op.SUM)).item()
        return [sums, last, again]


@pytest.mark.parametrize("hosts", [["a"], ["a", "a", "a"], ["a", "a", "b"]])
def test_joins(ranks: Ranks, hosts: list[str]) -> None:
    size = len(hosts)
    for rank, (sums, last, again) in enumerate(ranks(size, joins, hosts=hosts)):
        for step, (a, average, least, whole) in enumerate(sums):
            there = size - step  # ranks that are not through
            assert (a, average) == (there * (1.0 + step), pytest.approx(there / size))
            assert (least, whole) == (float(there == size), 3 * there)
        assert (last, again) == (size - 1, size), rank


def joins_and_other_kinds() -> None:
    with running() as (e, rank, size):
        if rank == 1:
            early = e.enqueue(allreduce(torch.full((2,), 5.0), "allreduce.early", op=Op.SUM))
            assert e.perform(Request(Kind.JOIN)) == 0
            assert e.synchronize(early).tolist() == [6.0, 6.0]
        else:
            e.synchronize(
                e.enqueue(allreduce(torch.ones(2), "allreduce.first", op=Op.SUM))
            )  # rank 1 has joined
            for kind in (Kind.ALLGATHER, Kind.BROADCAST, Kind.ALLTOALL, Kind.REDUCESCATTER):
                words = raised(
                    CollectiveMismatch, lambda k=kind: e.perform(Request(k, "x", torch.ones(2)))
                )
                assert "not supported with Join" in words
            assert "not supported with Join" in raised(
                CollectiveMismatch, lambda: e.perform(Request(Kind.BARRIER))
            )
            # what rank 1 gave before it joined still counts
            assert e.perform(allreduce(torch.ones(2), "allreduce.early", op=Op.SUM)).tolist() == [
                6.0,
                6.0,
            ]
            group = [allreduce(torch.ones(2), f"g{index}", op=Op.SUM) for index in range(3)]
            assert [each.tolist() for each in e.synchronize(e.enqueue_group(group))] == [
                [1.0, 1.0]
            ] * 3
            vector = torch.tensor([1.0, 2.0])
            assert torch.equal(e.perform(Request(Kind.ADASUM, "", vector, op=Op.ADASUM)), vector)
            assert e.perform(Request(Kind.JOIN)) == 0
        assert e.perform(Request(Kind.ALLGATHER, "x", torch.tensor([rank]))).tolist() == list(
            range(size)
        )


def test_joins_and_other_kinds(ranks: Ranks) -> None:
    ranks(2, joins_and_other_kinds)


def notices() -> list[list[int]]:
    """An optimizer with collectives of its own: rank 0 makes 5 steps, rank 1 three, rank 2 none
    before it joins."""
    import torch.distributed as dist

    import allstep

    allstep.init()
    with running() as (e, rank, size):
        heard: list[int] = []

        def step(number: int) -> None:
            total = torch.tensor([1.0 * number])
            dist.all_reduce(total)
            assert total.item() == size * number

        def participate(number: int) -> None:
            heard.append(number)
            step(number)

        e.on_notice("sgd", participate)
        for number in range(1, [6, 4, 1][rank]):
            e.notice("sgd", number)
            loss = e.perform(
                allreduce(torch.ones(1), "allreduce.loss", op=Op.SUM)
            ).item()  # before the step's own
            assert loss <= size
            step(number)
        assert e.perform(Request(Kind.JOIN)) == 0
        return heard


@pytest.mark.parametrize("hosts", [["a", "a", "a"], ["a", "a", "b"]])
def test_notices(ranks: Ranks, hosts: list[str]) -> None:
    assert ranks(3, notices, hosts=hosts) == [[], [4, 5], [1, 2, 3, 4, 5]]


def notice_to_one_who_does_not_know() -> str:
    e = engine.start()
    try:
        if e.world.rank == 0:
            e.notice("adam", 1)
            return raised(
                CommError, lambda: [e.perform(allreduce(torch.ones(1))) for _ in range(100_000)]
            )
        return raised(CommError, lambda: e.perform(Request(Kind.JOIN)))
    finally:
        e.shutdown()


def test_notice_to_one_who_does_not_know(ranks: Ranks) -> None:
    for words in ranks(2, notice_to_one_who_does_not_know):
        assert (
            "adam: other ranks begin step 1, but this rank has joined without a callback for it"
            in words
        )


# Process sets


def static_sets() -> None:
    with running(process_sets=[[1, 0], [1, 2], [0, 1, 2], [0, 1], []]) as (e, rank, _):
        assert e.process_sets == {0: (0, 1, 2), 1: (0, 1), 2: (1, 2)}
        mine = [number for number in (1, 2) if rank in e.process_sets[number]]
        order = mine if rank else mine[::-1]
        handles = {
            number: e.enqueue(
                allreduce(torch.full((2,), float(rank)), process_set=number, op=Op.SUM)
            )
            for number in order  # one name in several sets
        }
        handles[0] = e.enqueue(allreduce(torch.ones(2), op=Op.SUM))
        sums = {number: e.synchronize(handle).tolist()[0] for number, handle in handles.items()}
        expected = {0: 3.0, 1: 1.0, 2: 3.0}
        assert sums == {number: expected[number] for number in [*mine, 0]}
        for number in mine:
            ranks = e.process_sets[number]
            request = Request(
                Kind.BROADCAST, "x", torch.tensor([rank]), root=ranks[1], process_set=number
            )
            assert e.perform(request).item() == ranks[1]  # the root is a rank of the world
            gathered = e.perform(
                Request(Kind.ALLGATHER, "x", torch.tensor([rank]), process_set=number)
            )
            assert gathered.tolist() == list(ranks)
            e.perform(Request(Kind.BARRIER, process_set=number))
        assert "HOROVOD_DYNAMIC_PROCESS_SETS" in raised(ValueError, lambda: e.add_process_set([0]))


@pytest.mark.parametrize("hosts", [["a", "a", "a"], ["a", "a", "b"]])
def test_static_sets(ranks: Ranks, hosts: list[str]) -> None:
    ranks(3, static_sets, hosts=hosts)


def wrong_sets(sets: Sequence[Sequence[Sequence[int]]]) -> str:
    rank = int(os.environ["ALLSTEP_RANK"])
    return raised(ValueError, lambda: engine.start(process_sets=sets[rank]))


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        ([[[0, 0]]] * 2, "a rank is in it twice"),
        ([[[0, 2]]] * 2, "there is no rank 2 among 2 ranks"),
        ([[[0]], [[1]]], "process sets differ: rank "),
    ],
)
def test_wrong_sets(ranks: Ranks, sets: Any, words: str) -> None:
    assert all(words in found for found in ranks(2, wrong_sets, sets))


def one_rank_hangs() -> str:
    if os.environ["ALLSTEP_RANK"] == "0":
        return raised(CollectiveTimeout, engine.start)

    def hang(*_: object) -> None:
        time.sleep(3)
        raise ValueError("hung")

    # The package has a function of this name, too.
    with patch.object(importlib.import_module("allstep.engine.start"), "_check_alike", hang):
        return raised(ValueError, engine.start)


def test_a_rank_that_hangs_in_the_start_is_named(ranks: Ranks) -> None:
    found = ranks(2, one_rank_hangs, env={"ALLSTEP_START_TIMEOUT": "1.5"})
    assert found[0].startswith("init: 1 of 2 ranks have not come within 1.5 s: rank 1; ")
    assert found[1] == "hung"


def dynamic_sets() -> None:
    with running(dynamic=True) as (e, rank, size):
        assert e.add_process_set([2, 0]) == 1
        assert e.add_process_set([1]) == 2
        assert e.process_sets[1] == (0, 2)
        if rank != 1:
            assert e.perform(allreduce(torch.ones(1), process_set=1, op=Op.SUM)).item() == 2.0
        assert "duplicate process set" in raised(ValueError, lambda: e.add_process_set([0, 2]))
        assert "no rank 3" in raised(ValueError, lambda: e.add_process_set([0, 3]))
        assert "twice" in raised(ValueError, lambda: e.add_process_set([1, 1]))
        assert raised(CollectiveMismatch, lambda: e.add_process_set([rank])).startswith(
            "Mismatched process sets"
        )
        assert [e.remove_process_set(number) for number in (0, 7)] == [False, False]
        pending = e.enqueue(allreduce(torch.ones(1), process_set=1)) if rank == 0 else 0
        assert e.remove_process_set(1) is True
        if rank == 0:
            assert "process set 1 has been removed" in raised(
                ValueError, lambda: e.synchronize(pending)
            )
        assert "Invalid process set id 1" in raised(
            ValueError, lambda: e.enqueue(allreduce(torch.ones(1), process_set=1))
        )
        assert e.add_process_set([0, 1]) == 1
        if rank != 2:
            assert (
                e.perform(allreduce(torch.full((1,), 1.0 + rank), process_set=1, op=Op.SUM)).item()
                == 3.0
            )
        assert e.perform(allreduce(torch.ones(1), op=Op.SUM)).item() == size


@pytest.mark.parametrize("hosts", [["a", "a", "a"], ["a", "a", "b"]])
def test_dynamic_sets(ranks: Ranks, hosts: list[str]) -> None:
    ranks(3, dynamic_sets, hosts=hosts)


# Life


def again_and_again() -> list[float]:
    import gc
    import threading

    before = num_files = 0
    sums = []
    for number in range(6):
        e = engine.start()
        assert engine.current() is e and engine.start() is e and not e.is_stopped
        assert (
            e.enqueue(allreduce(torch.full((2,), float(number)), "", op=Op.SUM)) == 1
        )  # numbers begin again
        sums.append(e.synchronize(1).tolist()[0])
        e.shutdown()
        e.shutdown()
        assert engine.current() is None and e.is_stopped
        assert "has been shut down" in raised(
            EngineStopped, lambda e=e: e.enqueue(allreduce(torch.ones(1)))
        )
        threads = [thread.name for thread in threading.enumerate() if "engine" in thread.name]
        assert threads == []
        if number in (1, 5):
            gc.collect()
            num_files = len(os.listdir("/proc/self/fd"))
            before = before or num_files
    assert num_files <= before
    return sums


@pytest.mark.parametrize("hosts", [["a"], ["a", "a"], ["a", "b"]])
def test_start_shutdown_and_start_again(ranks: Ranks, hosts: list[str]) -> None:
    size = len(hosts)
    assert (
        ranks(size, again_and_again, hosts=hosts)
        == [[float(number * size) for number in range(6)]] * size
    )


def beside_torchs_group(engine_first: bool) -> list[float]:
    import torch.distributed as dist

    import allstep

    if engine_first:
        engine.start()
        assert not dist.is_initialized()
        allstep.init()
    else:
        allstep.init()
    with running() as (e, rank, _):
        total = torch.ones(1)
        dist.all_reduce(total)
        named = e.perform(allreduce(torch.ones(1), op=Op.SUM))
    allstep.shutdown()
    assert not dist.is_initialized()
    with running() as (e, rank, _):
        once_more = e.perform(allreduce(torch.full((1,), float(rank)), op=Op.SUM))
        allstep.init()
        dist.all_reduce(total)
        allstep.shutdown()
        allstep.init()
        dist.all_reduce(total)
        allstep.shutdown()
    return [total.item(), named.item(), once_more.item()]


@pytest.mark.parametrize("engine_first", [True, False])
def test_beside_torchs_group(ranks: Ranks, engine_first: bool) -> None:
    assert ranks(2, beside_torchs_group, engine_first) == [[8.0, 2.0, 1.0]] * 2


def without_a_launcher() -> tuple[int, float]:
    for name in [
        name
        for name in os.environ
        if name.startswith("ALLSTEP_") or "RANK" in name or "WORLD" in name
    ]:
        del os.environ[name]
    with running() as (e, _, size):
        return size, e.perform(allreduce(torch.tensor(3.0))).item()


def test_without_a_launcher(ranks: Ranks) -> None:
    assert ranks(1, without_a_launcher) == [(1, 3.0)]


def threads() -> None:
    """Eight threads ask and wait at once, in any order; each gets its own result."""
    from concurrent.futures import ThreadPoolExecutor

    with running() as (e, rank, size):

        def work(thread: int) -> None:
            for number in range(15):
                value = float(thread * 100 + number)
                request = allreduce(
                    torch.full((4,), value + rank), f"t{thread}.{number % 3}", op=Op.SUM
                )
                result = e.perform(request) if number % 2 else e.synchronize(e.enqueue(request))
                assert result.tolist() == [value * size + sum(range(size))] * 4

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(8)))


@pytest.mark.parametrize("hosts", [["a", "a"], ["a", "b"]])
def test_threads(ranks: Ranks, hosts: list[str]) -> None:
    ranks(len(hosts), threads, hosts=hosts)


def waiting_across() -> None:
    """Two threads of rank 0 wait for x and y; rank 1 gives x only after it has got what the second
    thread does after y."""
    import threading

    with running() as (e, rank, _):
        if rank == 0:

            def second() -> None:
                e.perform(allreduce(torch.ones(1), "y"))
                e.perform(allreduce(torch.ones(1), "z"))

            thread = threading.Thread(target=second)
            thread.start()
            e.perform(allreduce(torch.ones(1), "x"))
            thread.join()
        else:
            for name in "yzx":
                e.perform(allreduce(torch.ones(1), name))


def test_waiting_across(ranks: Ranks) -> None:
    ranks(2, waiting_across)


def nobody_waits() -> None:
    """Operations that no rank waits for are carried out all the same."""
    with running() as (e, _, size):
        tensors = [torch.ones(3) for _ in range(10)]
        handles = [
            e.enqueue(allreduce(t, f"n{k}", output=t, op=Op.SUM)) for k, t in enumerate(tensors)
        ]
        wait_until(lambda: all(map(e.poll, handles)))
        assert [tensor.tolist() for tensor in tensors] == [[float(size)] * 3] * 10
        for handle in handles:
            e.synchronize(handle)


@pytest.mark.parametrize("hosts", [["a", "a", "a"], ["a", "b"]])
def test_nobody_waits(ranks: Ranks, hosts: list[str]) -> None:
    ranks(len(hosts), nobody_waits, hosts=hosts)


def forks() -> list[Any]:
    """A child knows its place, and can neither use nor end the engine."""
    import multiprocessing

    def child(link: Any) -> None:
        e = engine.current()
        assert e is not None
        words = raised(EngineStopped, lambda: e.perform(allreduce(torch.ones(1))))
        e.shutdown()
        link.send([e.world.rank, words])

    with running() as (e, _, size):
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        process = context.Process(target=child, args=(theirs,))
        process.start()
        assert ours.poll(60)
        found: list[Any] = ours.recv()
        process.join(60)
        assert process.exitcode == 0
        assert e.perform(allreduce(torch.ones(1), op=Op.SUM)).item() == size
        return found


def test_forks(ranks: Ranks) -> None:
    for rank, (found, words) in enumerate(ranks(2, forks)):
        assert found == rank and "forked" in words


# Those that do not come


def stalls(seen: Path) -> None:
    """Rank 0 is alone with its tensor until it has made sure of that, and of a report, and says so
    by a file."""
    import time

    e = engine.start()
    if e.world.rank == 0:
        handle = e.enqueue(allreduce(torch.ones(1), "allreduce.lonely\x1b[2J"))
        time.sleep(0.9)
        if "HOROVOD_STALL_CHECK_DISABLE" not in os.environ:
            wait_until(
                lambda: "2: [allreduce.lonely\\x1b[2J]" in Path("0.out").read_text(),
                what="a report",
            )
        assert not e.poll(handle)
        seen.touch()
        e.synchronize(handle)
    else:
        wait_until(seen.exists, 60)
        e.perform(allreduce(torch.ones(1), "allreduce.lonely\x1b[2J"))
    e.perform(Request(Kind.BARRIER))
    e.shutdown()


def test_stalls_are_reported(ranks: Ranks, tmp_path: Path) -> None:
    outcomes = ranks.outcomes(3, stalls, tmp_path / "one", env={"ALLSTEP_STALL_SECONDS": "0.3"})
    assert [outcome.exit_code for outcome in outcomes] == [0, 0, 0], outcomes
    assert "for more than 0 seconds" in outcomes[0].output
    assert (
        "Missing ranks:\n1: [allreduce.lonely\\x1b[2J]\n2: [allreduce.lonely\\x1b[2J]\n"
        in outcomes[0].output
    )
    assert outcomes[1].output == outcomes[2].output == ""
    quiet = ranks.outcomes(
        3,
        stalls,
        tmp_path / "two",
        env={"ALLSTEP_STALL_SECONDS": "0.3", "HOROVOD_STALL_CHECK_DISABLE": "1"},
    )
    assert [outcome.output for outcome in quiet] == ["", "", ""]


def stalls_for_good(error: type[CommError]) -> str:
    e = engine.start()
    kind = Kind.BARRIER if e.world.rank else Kind.ALLREDUCE
    words = raised(error, lambda: e.perform(Request(kind, "", torch.ones(1))))
    assert e.is_stopped
    raised(error, lambda: e.enqueue(Request(Kind.BARRIER)))
    e.shutdown()
    return words


def test_a_stall_stops_all_when_asked(ranks: Ranks) -> None:
    env = {"ALLSTEP_STALL_SECONDS": "0.2", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "0.5"}
    for words in ranks(2, stalls_for_good, EngineStopped, env=env):
        assert "Will shutdown" in words and "1!: [allreduce.noname.1]" in words


def test_an_operation_that_waits_too_long(ranks: Ranks) -> None:
    for words in ranks(2, stalls_for_good, CollectiveTimeout, env={"ALLSTEP_TIMEOUT": "1.5"}):
        assert "did not request it within 1.5 s" in words
