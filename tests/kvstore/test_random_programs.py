"""Random programs of init, push, pull and pushpull, against a dict in one process.

The ranks run many programs in one start: starting processes takes most of the time. A program has
the calls of all workers in one order; a barrier after each makes that order real for stores whose
workers do not wait for each other.
"""

import os
import random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import allstep.kvstore
from support.ranks import Ranks

SOAK = bool(os.environ.get("ALLSTEP_SOAK"))
SHAPES: list[tuple[int, ...]] = [(), (1,), (2, 3), (0,), (5, 1, 2), (270_000,)]
Call = tuple[str, int, int]
"""Kind, key, number."""

CALLS = st.tuples(
    st.sampled_from(["push", "pull", "pushpull"]), st.integers(0, 2), st.integers(1, 9)
)


class Serial:
    """The reference: one number for each key, since all elements of a value are equal."""

    def __init__(self, learning_rate: float | None) -> None:
        self.values: dict[int, float] = {}
        self.lr = learning_rate

    def push(self, key: int, numbers: list[int]) -> None:
        """Push the sum of the numbers."""
        total = float(sum(numbers))
        self.values[key] = total if self.lr is None else self.values[key] - self.lr * total


@settings(max_examples=500 if SOAK else 30)
@given(
    st.lists(st.sampled_from(SHAPES), min_size=3, max_size=3),
    st.booleans(),
    st.lists(CALLS, max_size=20),
)
def test_a_local_store_is_a_dict(
    shapes: list[tuple[int, ...]], updates: bool, calls: list[Call]
) -> None:
    kv = allstep.kvstore.create("local")
    serial = Serial(0.5 if updates else None)
    for key, shape in enumerate(shapes):
        kv.init(key, torch.full(shape, float(key)))
        serial.values[key] = float(key)
    if updates:
        kv.set_optimizer(torch.optim.SGD, lr=0.5)
    run_alone(kv, serial, shapes, calls)


def run_alone(
    kv: allstep.kvstore.KVStore, serial: Serial, shapes: list[tuple[int, ...]], calls: list[Call]
) -> None:
    for kind, key, number in calls:
        out, value = torch.empty(shapes[key]), torch.full(shapes[key], float(number))
        if kind == "push":
            kv.push(key, [value, value])
            serial.push(key, [number, number])
        elif kind == "pushpull":
            kv.pushpull(key, value, out=out)
            serial.push(key, [number])
        if kind != "push":
            if kind == "pull":
                kv.pull(key, out=out)
            assert torch.equal(out, torch.full(shapes[key], serial.values[key]))


def random_program(
    draws: random.Random, kv: allstep.kvstore.KVStore, number: int, updates: bool
) -> None:
    """Run one program on all workers, which draw the same numbers."""
    is_sync, n = kv.type == "dist_sync", kv.num_workers
    serial = Serial(0.5 if updates else None)
    shapes = {number * 10 + i: draws.choice(SHAPES) for i in range(draws.randint(1, 3))}
    keys = list(shapes)
    kv.init(keys, [torch.full(shapes[key], float(key + kv.rank)) for key in keys])
    serial.values.update({key: float(key) for key in keys})
    for _ in range(draws.randint(1, 12)):
        key, pusher = draws.choice(keys), draws.randrange(n)
        numbers = [draws.randint(-9, 9) for _ in range(n)]
        in_one = draws.random() < 0.5
        out = torch.full(shapes[key], -1.0)
        if is_sync or kv.rank == pusher:
            value = torch.full(shapes[key], float(numbers[kv.rank]))
            if in_one:
                kv.pushpull(key, value, out=out)
            else:
                kv.push(key, value)
        serial.push(key, numbers if is_sync else [numbers[pusher]])
        if not is_sync:
            kv.barrier()
        if not in_one or (not is_sync and kv.rank != pusher):
            kv.pull(key, out=out)
        expected = torch.full(shapes[key], serial.values[key])
        assert torch.equal(out, expected), (key, out, serial.values)
        if not is_sync:
            kv.barrier()


@pytest.mark.soak
@pytest.mark.parametrize(("num_workers", "name"), [(2, "dist_sync"), (3, "dist_async")])
def test_a_shared_store_is_a_dict(
    ranks: Ranks, num_workers: int, name: str, soak_round: int
) -> None:
    def work() -> None:
        draws = random.Random(soak_round)
        for updates in (True, False) if name == "dist_sync" else (True,):
            with allstep.kvstore.create(name) as kv:
                if updates:
                    kv.set_optimizer(torch.optim.SGD, lr=0.5)
                for number in range(60 if SOAK else 12):
                    random_program(draws, kv, number, updates)

    ranks(num_workers, work)


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(CALLS, max_size=12))
@pytest.mark.parametrize("name", ["dist_sync", "dist_async", "dist_stale:1"])
def test_a_store_of_one_worker_is_a_dict(name: str, calls: list[Call]) -> None:
    serial: Any = Serial(0.5)
    with allstep.kvstore.create(name) as kv:
        for key, shape in enumerate(SHAPES[2:5]):
            kv.init(key, torch.full(shape, float(key)))
            serial.values[key] = float(key)
        kv.set_optimizer(torch.optim.SGD, lr=0.5)
        # Only one gradient may be on its way without a pull.
        pulled = [each for call in calls for each in (call, ("pull", call[1], 1))]
        run_alone(kv, serial, SHAPES[2:5], pulled)
