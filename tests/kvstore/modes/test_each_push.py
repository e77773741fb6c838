"""dist_async and dist_stale: updates are atomic, ages are bounded, lost workers stop no other."""

import os
import signal
import time
from typing import Any

import pytest
import torch

import allstep.kvstore
from allstep.errors import UserError
from allstep.kvstore.modes.each_push import BoundedAge
from allstep.optim import LAMB
from support.ranks import Ranks, wait_until

LARGE = 300_000
"""Two slices."""


def values_of(kv: allstep.kvstore.KVStore) -> Any:
    """The values behind a store, to look at versions."""
    return kv._values


def test_a_pull_is_between_two_updates(ranks: Ranks) -> None:
    """Each update adds the same number to all elements: no value pulled has two of them."""

    def work() -> int:
        with allstep.kvstore.create("dist_async") as kv:
            kv.init("w", torch.zeros(LARGE))
            kv.set_optimizer(torch.optim.SGD, lr=1.0)
            out, gradient = torch.empty(LARGE), torch.full((LARGE,), -1.0)
            for _ in range(15):
                kv.push("w", gradient)
                kv.pull("w", out=out)
                assert (out == out[0]).all()
            kv.barrier()
            versions = {each.num_updates for each in values_of(kv).keys["w"].slices}
            assert versions == {15 * kv.num_workers}
            return len(values_of(kv).keys["w"].slices)

    assert ranks(3, work) == [2] * 3


def test_state_belongs_to_the_key_not_to_the_worker(ranks: Ranks) -> None:
    """Adam counts the steps of all workers, LAMB uses norms of the whole key."""

    def work(cls: Any) -> tuple[list[float], int]:
        with allstep.kvstore.create("dist_async") as kv:
            kv.init("w", torch.ones(LARGE))
            kv.set_optimizer(cls, lr=0.01)
            for turn in range(6):
                if turn % kv.num_workers == kv.rank:
                    kv.push("w", torch.full((LARGE,), 1.0 + turn))
                kv.barrier()
            out = torch.empty(LARGE)
            kv.pull("w", out=out)
            return out.unique().tolist(), len(values_of(kv).keys["w"].slices)

    for cls, num_slices in ((torch.optim.AdamW, 2), (LAMB, 1)):
        parameter = torch.nn.Parameter(torch.ones(LARGE))
        optimizer = cls([parameter], lr=0.01)
        for turn in range(6):
            parameter.grad = torch.full((LARGE,), 1.0 + turn)
            optimizer.step()
        expected = parameter.detach().unique().tolist()
        assert ranks(2, work, cls) == [(expected, num_slices)] * 2


@pytest.mark.parametrize("rounds", [1, 2])
def test_no_gradient_is_older_than_the_bound(ranks: Ranks, rounds: int) -> None:
    """The age is counted by its definition: updates by others between read and own update."""

    def work() -> tuple[int, int]:
        with allstep.kvstore.create(f"dist_stale:{rounds}") as kv:
            kv.init("w", torch.zeros(300_000))
            kv.set_optimizer(torch.optim.SGD, lr=1.0)
            out, gradient = torch.zeros(300_000), torch.full((300_000,), -1.0)
            oldest, read = 0, 0
            end = time.monotonic() + 0.8
            while time.monotonic() < end:
                # The last worker is slow.
                time.sleep(0.02 if kv.rank == kv.num_workers - 1 else 0.001)
                kv.pushpull("w", gradient, out=out)
                now = int(out[0])
                oldest, read = max(oldest, now - 1 - read), now
            kv.barrier()
            return oldest, read

    results = ranks(3, work)
    oldest = max(age for age, _ in results)
    assert 0 < oldest <= 3 * rounds, results


def test_a_push_waits_and_a_pull_or_a_barrier_releases_it(ranks: Ranks) -> None:
    def work() -> float:
        kv = allstep.kvstore.create("dist_stale:1")
        kv.init("w", torch.zeros(4))
        kv.set_optimizer(torch.optim.SGD, lr=1.0)
        out = torch.empty(4)
        if kv.rank == 0:
            for _ in range(5):
                kv.pushpull("w", torch.ones(4), out=out)
            kv.barrier()
            return out[0].item()
        (only,) = values_of(kv).keys["w"].slices
        for reached in (2, 4):
            wait_until(lambda wanted=reached: only.num_updates == wanted)
            # A push that did not wait would come within this time.
            time.sleep(0.2)
            assert only.num_updates == reached
            if reached == 2:
                kv.pull("w", out=out)
        kv.barrier()
        # The weights of this worker are too old now, so a gradient of them is refused.
        with pytest.raises(UserError, match="is 3 updates old, the limit of 'dist_stale:1'"):
            kv.push("w", torch.ones(4))
        kv.pull("w", out=out)
        kv.push("w", torch.ones(4))
        return 0.0

    assert ranks(2, work) == [-5.0, 0.0]


@pytest.mark.parametrize("name", ["dist_async", "dist_stale:1"])
def test_a_lost_worker_does_not_stop_the_others(ranks: Ranks, name: str) -> None:
    def work() -> tuple[float, int]:
        kv = allstep.kvstore.create(name)
        kv.init("w", torch.zeros(4))
        kv.set_optimizer(torch.optim.SGD, lr=1.0)
        out = torch.empty(4)
        kv.pushpull("w", -torch.ones(4), out=out)
        if kv.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        gap = 0.0
        for _ in range(100):
            began = time.monotonic()
            kv.pushpull("w", -torch.ones(4), out=out)
            gap = max(gap, time.monotonic() - began)
        kv.barrier()
        kv.pull("w", out=out)
        return gap, int(out[0])

    first, dead, last = ranks.outcomes(3, work)
    assert (first.exit_code, dead.exit_code, last.exit_code) == (0, -9, 0), first.output
    assert first.result[1] == last.result[1] == 203
    assert max(first.result[0], last.result[0]) < 5


def test_an_error_of_the_optimizer_keeps_no_lock(ranks: Ranks) -> None:
    class Failing(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            (parameter,) = self.param_groups[0]["params"]
            if bool((parameter.grad > 5).any()):
                raise ArithmeticError("too large")
            return super().step(closure)

    def work() -> float:
        with allstep.kvstore.create("dist_async") as kv:
            kv.init("w", torch.zeros(4))
            kv.set_optimizer(Failing, lr=1.0)
            with pytest.raises(ArithmeticError):
                kv.push("w", torch.full((4,), 9.0))
            out = torch.empty(4)
            kv.pushpull("w", torch.ones(4), out=out)
            kv.barrier()
            kv.pull("w", out=out)
            return out[0].item()

    assert ranks(2, work) == [-2.0, -2.0]


def test_the_bound_is_rounds_of_all_workers() -> None:
    with allstep.kvstore.create("dist_stale:3") as kv:
        values = values_of(kv)
        assert isinstance(values, BoundedAge) and values.bound == 3


def test_a_barrier_keeps_the_gradients_that_are_in_time(ranks: Ranks) -> None:
    """After it, a quick worker waits again for a slow one, which has not pulled."""

    def work() -> int:
        with allstep.kvstore.create("dist_stale:1") as kv:
            kv.init("w", torch.zeros(4))
            kv.set_optimizer(torch.optim.SGD, lr=1.0)
            out, oldest = torch.zeros(4), 0
            for turn in range(4):
                kv.barrier()
                if turn % 2 == 0:
                    kv.pull("w", out=out)
                time.sleep(0.05 * kv.rank)
                # After the second barrier of a pair, all weights are at most 2 updates old.
                for _ in range(1 if kv.rank or turn % 2 == 0 else 3):
                    before = int(out[0])
                    kv.pushpull("w", -torch.ones(4), out=out)
                    oldest = max(oldest, int(out[0]) - 1 - before)
            kv.barrier()
            return oldest

    assert max(ranks(3, work)) <= 3
