"""Random programs of named operations, asked for in another order on every rank, against a model
that computes them one after the other.

A program has phases. In a phase every rank asks for the same operations, shuffled in its own way,
some of them as groups, some on process sets, a few of them wrong on one rank; then it waits for
some of them, and leaves others for a later phase. At the end the ranks join.
"""

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch

from allstep import engine
from allstep.engine import Engine, Kind, Op, Request
from allstep.errors import CollectiveMismatch
from support.ranks import Ranks

SETS: dict[int, list[list[int]]] = {
    1: [[0]],
    2: [[0, 1]],
    3: [[0, 1], [2, 1]],
    4: [[3, 0], [1, 2, 3]],
}
DTYPES = (torch.float32, torch.float64, torch.int32, torch.int64, torch.float16, torch.uint8)
REDUCED = {
    Op.SUM: torch.sum,
    Op.AVERAGE: torch.sum,
    Op.MIN: torch.amin,
    Op.MAX: torch.amax,
    Op.PRODUCT: torch.prod,
}


class Operation(NamedTuple):
    """One request of each member, and what each is to get: a tensor, or the words of an error."""

    name: str
    members: Sequence[int]
    requests: dict[int, Request]
    expected: dict[int, Any]


def make(rng: random.Random, name: str, number: int, members: Sequence[int]) -> Operation:
    kind = rng.choice(
        [Kind.ALLREDUCE] * 4 + [Kind.ALLGATHER, Kind.BROADCAST, Kind.ALLTOALL, Kind.REDUCESCATTER]
    )
    dtype = rng.choice(DTYPES)
    shape = [rng.choice([1, 2, 5]) for _ in range(rng.randint(1, 3))]
    if rng.random() < 0.05:
        shape = [70, 300]
    size = len(members)

    def values(num_rows: int) -> torch.Tensor:
        count = num_rows * torch.Size(shape[1:]).numel()
        return torch.tensor([rng.randint(0, 3) for _ in range(count)], dtype=dtype).view(
            num_rows, *shape[1:]
        )

    rows = [shape[0]] * size
    if kind is Kind.ALLGATHER:
        rows = [rng.randint(0, 3) for _ in members]
    splits = [[rng.randint(0, 2) for _ in members] for _ in members]
    if kind is Kind.ALLTOALL:
        rows = [sum(each) + rng.randint(0, 1) for each in splits]
    tensors = [values(count) for count in rows]
    op = rng.choice(list(REDUCED)) if kind is Kind.ALLREDUCE else rng.choice([Op.SUM, Op.AVERAGE])
    prescale, postscale = (
        (rng.choice([1.0, 2.0]), rng.choice([1.0, 0.5])) if kind is Kind.ALLREDUCE else (1.0, 1.0)
    )
    root = rng.choice(members)
    requests = {
        rank: Request(
            kind,
            name,
            tensor,
            tensor.clone() if kind is Kind.ALLREDUCE and rng.random() < 0.5 else None,
            op,
            prescale,
            postscale,
            root,
            tuple(splits[index]) if kind is Kind.ALLTOALL else None,
            number,
        )
        for index, (rank, tensor) in enumerate(zip(members, tensors, strict=True))
    }
    return Operation(name, members, requests, expected_of(kind, members, tensors, splits, requests))


def expected_of(
    kind: Kind,
    members: Sequence[int],
    tensors: Sequence[torch.Tensor],
    splits: Any,
    requests: dict[int, Request],
) -> dict[int, Any]:
    first, size = requests[members[0]], len(members)
    if kind is Kind.ALLGATHER:
        return dict.fromkeys(members, torch.cat(list(tensors)))
    if kind is Kind.BROADCAST:
        return dict.fromkeys(members, tensors[members.index(first.root)])
    if kind is Kind.ALLTOALL:
        cut = [
            torch.split(tensor[: sum(each)], each)
            for tensor, each in zip(tensors, splits, strict=True)
        ]
        return {
            rank: torch.cat([each[index] for each in cut]) for index, rank in enumerate(members)
        }
    after = first.postscale / size if first.op is Op.AVERAGE else first.postscale
    stacked = torch.stack([scaled(tensor, first.prescale) for tensor in tensors])
    total = stacked.double() if stacked.is_floating_point() else stacked
    total = REDUCED[first.op](total, dim=0).to(first.tensor.dtype)  # type: ignore[union-attr]
    total = scaled(total, after)
    if kind is Kind.ALLREDUCE:
        return dict.fromkeys(members, total)
    num_rows = total.shape[0]
    cut_rows = [num_rows // size + (index < num_rows % size) for index in range(size)]
    return dict(zip(members, torch.split(total, cut_rows), strict=True))


def scaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    if factor == 1.0:
        return tensor
    exact = tensor.dtype if tensor.dtype in (torch.float32, torch.float64) else torch.float64
    exact = torch.float32 if tensor.dtype == torch.float16 else exact
    return (tensor.to(exact) * factor).to(tensor.dtype)


def spoil(rng: random.Random, operation: Operation) -> Operation:
    """Give one rank another dtype."""
    odd = rng.choice(operation.members)
    request = operation.requests[odd]
    assert request.tensor is not None
    other = torch.zeros_like(request.tensor, dtype=torch.int16)
    output = None if request.output is None else other
    fields = (
        request.op,
        request.prescale,
        request.postscale,
        request.root,
        request.splits,
        request.process_set,
    )
    wrong = Request(request.kind, request.name, other, output, *fields)
    refused = dict.fromkeys(operation.members, "Mismatched data types")
    return operation._replace(requests={**operation.requests, odd: wrong}, expected=refused)


def run_program(e: Engine, seed: int) -> None:
    rng, own = random.Random(seed), random.Random(seed * 1000 + e.world.rank)
    rank, waiting = e.world.rank, {}
    for phase in range(rng.randint(1, 4)):
        operations = []
        for index in range(rng.randint(1, 12)):
            number = rng.choice(list(e.process_sets))
            operation = make(rng, f"{seed}.{phase}.{index}", number, e.process_sets[number])
            wrong = len(operation.members) > 1 and rng.random() < 0.1
            operations.append(spoil(rng, operation) if wrong else operation)
        mine = [operation for operation in operations if rank in operation.members]
        own.shuffle(mine)
        while mine:
            count = 1 if own.random() < 0.8 else own.randint(1, len(mine))
            now, mine = mine[:count], mine[count:]
            requests = [operation.requests[rank] for operation in now]
            handle = e.enqueue(requests[0]) if count == 1 else e.enqueue_group(requests)
            waiting[handle] = now
            e.poll(own.choice(list(waiting)))
        handles = list(waiting)
        own.shuffle(handles)
        for handle in handles[: own.randint(0, len(handles))]:
            check(e, handle, waiting.pop(handle), rank)
    for handle, operations in waiting.items():
        check(e, handle, operations, rank)
    assert e.perform(Request(Kind.JOIN)) in range(e.world.size)


def check(e: Engine, handle: int, operations: Sequence[Operation], rank: int) -> None:
    refusals = [operation for operation in operations if isinstance(operation.expected[rank], str)]
    if refusals:
        with pytest.raises(CollectiveMismatch, match="Mismatched data types"):
            e.synchronize(handle)
        return
    results = e.synchronize(handle)
    for operation, result in zip(
        operations, results if len(operations) > 1 else (results,), strict=True
    ):
        expected = operation.expected[rank]
        found = result[0] if operation.requests[rank].kind is Kind.ALLTOALL else result
        assert found.dtype == expected.dtype and torch.equal(found, expected), (operation, found)


def run_programs(seeds: Sequence[int]) -> None:
    import os

    e = engine.start(process_sets=SETS[int(os.environ["ALLSTEP_SIZE"])])
    for seed in seeds:
        run_program(e, seed)
    e.perform(Request(Kind.BARRIER))
    e.shutdown()


@pytest.mark.soak(5)
@pytest.mark.parametrize(
    ("hosts", "num_programs"),
    [
        (["a"], 10),
        (["a"] * 2, 40),
        (["a"] * 3, 25),
        (["a"] * 4, 5),
        (["a", "b"], 10),
        (["a", "b", "a"], 10),
    ],
)
def test_random_programs(
    ranks: Ranks, hosts: list[str], num_programs: int, soak_round: int
) -> None:
    first = 1000 * soak_round + 100 * len(hosts) + 10_000 * len(set(hosts))
    ranks(len(hosts), run_programs, range(first, first + num_programs), hosts=hosts, timeout=150)
