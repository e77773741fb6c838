"""The rows of MXNet's contract on workers of several hosts with 1 to 3 servers.

Hosts are imagined, their links are real (loopback); a start of servers serves many rows. Real hosts
are in `test_two_hosts`.
"""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import allstep
import allstep.kvstore
from allstep.errors import CollectiveMismatch, CommError, PeerLost, UserError
from allstep.kvstore import KVStore
from support.ranks import Ranks
from support.store_servers import kill_server, kill_worker, outcomes_with_servers, with_servers

SHAPES = pytest.mark.parametrize(("hosts", "num_servers"), [("ab", 1), ("aabb", 2), ("aab", 3)])
LARGE = (3, 200_000)
FAST = {"ALLSTEP_LOST_SECONDS": "4"}


def pulled(kv: KVStore, key: Any, shape: tuple[int, ...] = (2, 3)) -> Tensor:
    out = torch.full(shape, -1.0)
    kv.pull(key, out=out)
    return out


def number(value: Tensor) -> float:
    """Return the number that all elements of a value are."""
    first = value.reshape(-1)[0]
    assert (value == first).all(), value
    return first.item()


def filled(value: float, shape: tuple[int, ...] = (2, 3)) -> Tensor:
    return torch.full(shape, float(value))


def rows_of_all_stores(name: str) -> None:
    kv = allstep.kvstore.create(name)
    out = torch.empty(2, 3)
    kv.broadcast(7, filled(5 + kv.rank), out=out)
    assert number(out) == 5 and kv.type == name
    kv.init([8, 9], [filled(1, LARGE), torch.tensor(2.0)])
    assert number(pulled(kv, 8, LARGE)) == 1 and number(pulled(kv, 9, ())) == 2
    strided, parameter = torch.empty(3, 2).t(), nn.Parameter(torch.empty(2, 3))
    kv.pull([7], out=[[strided, parameter]])
    assert number(strided) == number(parameter) == 5
    table = torch.arange(700_000.0).view(-1, 7)
    kv.init(10, table)
    sparse = torch.sparse_coo_tensor(size=table.shape, check_invariants=False)
    kv.row_sparse_pull(10, out=sparse, row_ids=torch.tensor([99_999, 3, 37_449, 3]))
    assert torch.equal(sparse._values(), table[[3, 37_449, 99_999]])
    kv.barrier()
    with pytest.raises(UserError, match="duplicate init of key 7"):
        kv.init(7, out)
    with pytest.raises(UserError, match=r"set_updater: .* are on servers"):
        kv.set_updater(lambda key, gradient, value: None)
    kv.barrier()
    kv.close()
    with pytest.raises(UserError, match="this kvstore is closed"):
        kv.pull(7, out=out)


def rows_of_sync() -> None:
    with allstep.kvstore.create("dist_sync") as kv:
        size = kv.num_workers
        kv.init([3, "w"][:1], [filled(kv.rank)])
        kv.init(4, filled(0, LARGE))
        assert number(pulled(kv, 3)) == 0
        total = sum(10.0**rank for rank in range(size))
        for step in (1, 2):
            kv.push(3, filled(step * 10.0**kv.rank))
            assert number(pulled(kv, 3)) == step * total
        # The second push waits for the round of the first one.
        kv.push(3, filled(1))
        kv.push(3, [filled(1), filled(1)])
        assert number(pulled(kv, 3)) == 2 * size
        value = filled(1, LARGE)
        kv.pushpull(4, value)
        assert number(value) == size
        kv.set_optimizer(torch.optim.SGD, lr=0.5)
        kv.pushpull(4, filled(1, LARGE), out=value)
        assert number(value) == size - 0.5 * size
        # Pushes and pulls in another order on each worker.
        for key in (3, 4) if kv.rank % 2 else (4, 3):
            kv.push(key, filled(1, (2, 3) if key == 3 else LARGE))
        assert number(pulled(kv, 4, LARGE)) == 0.0
        assert number(pulled(kv, 3)) == 1.5 * size
        kv.barrier()


def rows_of_async() -> None:
    with allstep.kvstore.create("Dist_Async") as kv:
        size, out = kv.num_workers, torch.zeros(LARGE)
        kv.init(["a", "b"], [filled(0), filled(0, LARGE)])
        with pytest.raises(UserError, match="has no optimizer yet; call set_optimizer"):
            kv.push("a", filled(1))
        kv.set_optimizer(torch.optim.SGD, lr=1.0)
        for step in range(1, 11):
            kv.push("a", filled(-1))
            kv.pushpull("b", filled(-1, LARGE), out=out)
            # After our own update.
            assert out.min() >= step
        kv.barrier()
        assert number(pulled(kv, "a")) == number(pulled(kv, "b", LARGE)) == 10 * size
        kv.barrier()


def rows_of_stale() -> None:
    with allstep.kvstore.create("dist_stale:2") as kv:
        out = torch.zeros(LARGE)
        kv.init(1, out)
        kv.set_optimizer(torch.optim.SGD, lr=1.0)
        for _ in range(6):
            time.sleep(0.003 * kv.rank)
            kv.pushpull(1, filled(-1, LARGE), out=out)
        kv.push(1, filled(-1, LARGE))
        with pytest.raises(UserError, match=r"not pulled since.*; pull the key before each push"):
            kv.push(1, filled(-1, LARGE))
        kv.barrier()
        assert number(pulled(kv, 1, LARGE)) == 7 * kv.num_workers
        kv.barrier()


def rows_of_state(folder: Path) -> None:
    """The state of one store continues in another, as if there had been one."""
    for name in ("dist_sync", "dist_async"):
        reference = nn.Parameter(torch.zeros(LARGE))
        optimizer = torch.optim.SGD([reference], lr=0.25, momentum=0.5)
        states = folder / name
        for turn in range(2):
            with allstep.kvstore.create(name) as kv:
                kv.init([1, 2], [reference.detach(), torch.zeros(3)])
                kv.set_optimizer(torch.optim.SGD, lr=0.25, momentum=0.5)
                if turn:
                    kv.load_optimizer_states(states)
                out = torch.empty(LARGE)
                for _ in range(2):
                    # One gradient in all: the others push none, or zeros.
                    reference.grad = filled(kv.num_workers if name == "dist_sync" else 1, LARGE)
                    optimizer.step()
                    if name == "dist_sync" or kv.rank == 0:
                        kv.push(1, filled(1, LARGE))
                    kv.barrier()
                    kv.pull(1, out=out)
                    assert torch.equal(out, reference)
                    kv.barrier()
                if kv.rank == 0:
                    kv.save_optimizer_states(states)
                kv.barrier()


def rows_of_whole_keys_and_half_precision() -> None:
    from allstep.optim import LARS

    for name in ("dist_sync", "dist_async"):
        value = torch.arange(600_000.0).view(LARGE) / 600_000
        parameter = nn.Parameter(value.clone())
        reference = LARS([parameter], lr=0.1)
        with allstep.kvstore.create(name) as kv:
            kv.init([1, 2], [value, torch.ones(4)])
            kv.set_optimizer(LARS, lr=0.1)
            kv.init(3, torch.ones(5))
            out = torch.empty(LARGE)
            parameter.grad = torch.ones(LARGE)
            if name == "dist_sync":
                parameter.grad *= kv.num_workers
            reference.step()
            if name == "dist_sync" or kv.rank == 0:
                kv.push(1, torch.ones(LARGE))
            kv.barrier()
            kv.pull(1, out=out)
            assert torch.allclose(out, parameter)
            kv.barrier()
        with allstep.kvstore.create(name) as kv:
            kv.init(1, torch.ones(4, dtype=torch.bfloat16))
            kv.set_optimizer(torch.optim.SGD, lr=1e-3, multi_precision=True)
            for _ in range(20):
                half = torch.ones(4, dtype=torch.bfloat16)
                kv.pushpull(1, half)
            kv.barrier()
            kv.pull(1, out=half)
            expected = torch.tensor(1 - 20 * kv.num_workers * 1e-3).to(torch.bfloat16)
            assert (half == expected).all(), (half, expected)
            kv.barrier()


def sent_of_three(kv: KVStore, name: str) -> list[float]:
    """Return what was sent of three gradients of 0.3 per worker, with a threshold of 0.5.

    Of one worker: nothing; then 0.5 of 0.6; then nothing of 0.4. In sync a host sends its sum.
    """
    hosts = list(kv._values.servers.hosts)  # type: ignore[attr-defined]
    counts = [hosts.count(host) for host in sorted(set(hosts))]
    residuals, total, found = [0.0] * len(counts), 0.0, []
    if name != "dist_sync":
        counts, residuals = [1] * len(hosts), [0.0] * len(hosts)
    for _ in range(3):
        for sender, count in enumerate(counts):
            residuals[sender] += 0.3 * count
            sent = 0.5 if residuals[sender] >= 0.5 else 0.0
            residuals[sender] -= sent
            total += sent
        found.append(total)
    return found


def rows_of_compressed() -> None:
    """Each sender quantizes, a worker or a host; sparse gradients are refused."""
    for name in ("dist_sync", "dist_async", "dist_stale:2"):
        with allstep.kvstore.create(name) as kv:
            kv.init([1, 2], [filled(0, LARGE), filled(0)])
            with pytest.raises(UserError, match="set_gradient_compression: rank 0 passes 2bit"):
                kv.set_gradient_compression({"type": "2bit", "threshold": 0.5 + kv.rank})
            kv.set_gradient_compression({"type": "2bit", "threshold": 0.5})
            kv.set_optimizer(torch.optim.SGD, lr=1.0)
            out = torch.empty(LARGE)
            for received in sent_of_three(kv, name):
                kv.pushpull(1, filled(-0.3, LARGE), out=out)
                kv.barrier()
                kv.pull(1, out=out)
                assert number(out) == received
                kv.barrier()
            with pytest.raises(UserError, match="takes dense gradients"):
                kv.push(2, filled(1).to_sparse(1))
            kv.barrier()


TABLES = {"small rows": (3000, 16), "long rows": (5, 30_000), "cube": (400, 4, 16), "few": (3, 2)}
"""Rows within parts; rows that parts cut; rows of several dimensions; a key that is not cut."""


def rows_pushed(key: str, rank: int, step: int) -> Tensor:
    """Return a gradient of some rows, of small integers: sums are exact in any order."""
    draws = torch.Generator().manual_seed(100 * rank + step + len(key))
    shape = TABLES[key]
    rows = torch.randint(0, shape[0], (1 + rank + step,), generator=draws)
    values = torch.randint(-4, 5, (rows.numel(), *shape[1:]), generator=draws).float()
    return torch.sparse_coo_tensor(rows[None], values, shape, check_invariants=False)


class LazyMomentum:
    """SGD with momentum 0.5 on the rows of a gradient only."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.value, self.momentum = torch.zeros(shape), torch.zeros(shape)

    def push(self, gradients: list[Tensor], *, is_dense: bool = False) -> None:
        total = sum(each.to_dense() for each in gradients)
        rows = torch.cat([each.coalesce().indices()[0] for each in gradients]).unique()
        rows = torch.arange(len(self.value)) if is_dense else rows
        self.momentum[rows] = 0.5 * self.momentum[rows] + total[rows]
        self.value[rows] -= 0.5 * self.momentum[rows]


def row_pull(kv: KVStore, key: str, numbers: Tensor) -> Tensor:
    out = torch.sparse_coo_tensor(size=TABLES[key], check_invariants=False)
    kv.row_sparse_pull(key, out=out, row_ids=numbers)
    return out._values()


def rows_of_sparse_sync() -> None:
    with allstep.kvstore.create("dist_sync") as kv:
        models = {key: LazyMomentum(shape) for key, shape in TABLES.items()}
        kv.init(list(TABLES), [torch.zeros(shape) for shape in TABLES.values()])
        kv.set_optimizer(torch.optim.SGD, lr=0.5, momentum=0.5)
        for step in range(5):
            for key, model in models.items():
                gradients = [rows_pushed(key, rank, step) for rank in range(kv.num_workers)]
                # In one round, one worker has a dense gradient: then the round is dense.
                is_dense = step == 3
                model.push(gradients, is_dense=is_dense)
                own = gradients[kv.rank]
                kv.push(key, own.to_dense() if is_dense and kv.rank == 1 else own)
                if step % 2:
                    numbers = torch.tensor([0, len(model.value) - 1, 1])
                    assert torch.equal(row_pull(kv, key, numbers), model.value[numbers.unique()])
                if step > 2:
                    assert torch.equal(pulled(kv, key, TABLES[key]), model.value)
        kv.barrier()
    with allstep.kvstore.create("dist_sync") as kv:
        # Without an optimizer the rows replace the value.
        kv.init("few", torch.ones(3, 2))
        kv.push("few", rows_pushed("few", 0, 1))
        expected = kv.num_workers * rows_pushed("few", 0, 1).to_dense()
        assert torch.equal(pulled(kv, "few", (3, 2)), expected)
        kv.barrier()


def rows_of_sparse_pushes() -> None:
    for name in ("dist_async", "dist_stale:2"):
        with allstep.kvstore.create(name) as kv:
            kv.init(list(TABLES), [torch.zeros(shape) for shape in TABLES.values()])
            kv.set_optimizer(torch.optim.SGD, lr=0.5)
            for step in range(4):
                for key in TABLES:
                    kv.push(key, rows_pushed(key, kv.rank, step))
                    row_pull(kv, key, torch.tensor([0]))
            kv.barrier()
            for key, shape in TABLES.items():
                total = sum(
                    rows_pushed(key, rank, step).to_dense()
                    for rank in range(kv.num_workers)
                    for step in range(4)
                )
                assert torch.equal(pulled(kv, key, shape), -0.5 * total)
            kv.barrier()
            if name == "dist_stale:2":
                kv.push("few", rows_pushed("few", 0, 0))
                with pytest.raises(UserError, match="not pulled since"):
                    kv.push("few", rows_pushed("few", 0, 0))
            kv.barrier()
    from allstep.optim import LARS

    with allstep.kvstore.create("dist_async") as kv:
        kv.init("few", torch.zeros(3, 2))
        kv.set_optimizer(LARS, lr=0.1)
        with pytest.raises(UserError, match="LARS uses norms of whole layers"):
            kv.push("few", rows_pushed("few", 0, 0))
        kv.barrier()


def rows_of_mistakes() -> None:
    with allstep.kvstore.create("dist_sync") as kv:
        with pytest.raises(UserError, match=r"init: rank 0 passes .*rank 1 passes.*pass the same"):
            kv.init(3, torch.ones(2 + kv.rank))
        kv.init(3, torch.ones(2))
        with pytest.raises(UserError, match="pass the same on all workers"):
            kv.set_optimizer(torch.optim.SGD, lr=0.1 + kv.rank)

        class Local(torch.optim.SGD):
            pass

        with pytest.raises(UserError, match="defined in the script itself, which servers do not"):
            kv.set_optimizer(Local, lr=0.1)
        call = (lambda: kv.init(4, torch.ones(2))) if kv.rank else kv.barrier
        with pytest.raises(CollectiveMismatch, match="calls barrier and rank"):
            call()
        kv.set_optimizer(torch.optim.SGD, lr=0.5)
        kv.push(3, torch.ones(2))
        assert number(pulled(kv, 3, (2,))) == 1 - 0.5 * kv.num_workers
        kv.barrier()


def all_rows(folder: Path) -> float:
    for name in ("dist_sync", "dist_async", "dist_stale:2", "horovod"):
        rows_of_all_stores(name)
    rows_of_sync()
    rows_of_async()
    rows_of_stale()
    rows_of_state(folder)
    rows_of_whole_keys_and_half_precision()
    rows_of_compressed()
    rows_of_sparse_sync()
    rows_of_sparse_pushes()
    rows_of_mistakes()
    return 1.0


@SHAPES
def test_the_rows_of_the_contract(
    ranks: Ranks, tmp_path: Path, hosts: str, num_servers: int
) -> None:
    assert with_servers(ranks, hosts, num_servers, all_rows, tmp_path) == [1.0] * len(hosts)


def test_the_sum_does_not_depend_on_who_comes_first(ranks: Ranks) -> None:
    """In rank order within a host, then in order of hosts: on every worker the same bits."""

    def work() -> list[Tensor]:
        with allstep.kvstore.create("dist_sync") as kv:
            kv.init(1, torch.zeros(1000))
            found = []
            for step in range(4):
                gradient = torch.randn(1000, generator=torch.Generator().manual_seed(kv.rank))
                time.sleep(0.02 * ((kv.rank + step) % 4))
                kv.pushpull(1, gradient)
                found.append(gradient)
            kv.barrier()
            return found

    first, second, third, fourth = (
        torch.randn(1000, generator=torch.Generator().manual_seed(rank)) for rank in range(4)
    )
    expected = (first + second) + (third + fourth)
    for found in with_servers(ranks, "aabb", 2, work):
        assert all(torch.equal(value, expected) for value in found)


def outcome_of(act: Callable[[], None]) -> tuple[str, str, float]:
    """Return the error of a call that must fail, and the seconds until then."""
    began = time.monotonic()
    try:
        while time.monotonic() < began + 60:
            act()
    except CommError as error:
        return type(error).__name__, str(error), time.monotonic() - began
    return "none", "", time.monotonic() - began


def test_a_server_of_sync_that_is_killed(ranks: Ranks) -> None:
    """In the middle of pushes of 8 MB: all workers get PeerLost, and each later call, too."""

    def work() -> Any:
        kv = allstep.kvstore.create("dist_sync")
        kv.init(1, torch.zeros(2_000_000))
        kv.set_optimizer(torch.optim.SGD, lr=1.0)
        out = torch.zeros(2_000_000)
        for _ in range(3):
            kv.pushpull(1, torch.ones(2_000_000), out=out)
        kv.barrier()
        if kv.rank == 0:
            time.sleep(0.5)
            kill_server(1)
        found = outcome_of(lambda: kv.pushpull(1, torch.ones(2_000_000), out=out))
        with pytest.raises(PeerLost):
            kv.barrier()
        kv.close()
        return found

    for outcome in outcomes_with_servers(ranks, "aab", 2, work, env=FAST)[:3]:
        assert outcome.exit_code == 0, outcome.output
        error, text, seconds = outcome.result
        assert error == "PeerLost" and "lost server 1 on " in text and "process exited" in text
        assert seconds < 20


KILLS = range(10) if os.environ.get("ALLSTEP_SOAK") else [0]


@pytest.mark.soak(1)  # its count is in KILLS
@pytest.mark.parametrize("seed", KILLS)
def test_a_worker_that_is_killed_stops_no_other_in_async(ranks: Ranks, seed: int) -> None:
    """At a random moment of its pushes, mostly in the middle of a message; it pushes zeros."""

    def work() -> float:
        kv = allstep.kvstore.create("dist_async")
        kv.init(1, torch.zeros(1_000_000))
        kv.set_optimizer(torch.optim.SGD, lr=1.0)
        kv.barrier()
        if kv.rank == 0:
            timer = threading.Timer(Random(seed).uniform(0.05, 0.5), lambda: kill_worker(1))
            timer.start()
        gradient = torch.full((1_000_000,), 0.0 if kv.rank == 1 else 1.0)
        for _ in range(30):
            kv.push(1, gradient)
            kv.pull(1, out=torch.empty(1_000_000))
        while kv.rank == 1:
            kv.push(1, gradient)
        if kv.rank == 0:
            timer.join()
        kv.barrier()
        found = number(pulled(kv, 1, (1_000_000,)))
        with pytest.raises(PeerLost, match="kvstore, init: lost rank 1"):
            kv.init(2, torch.zeros(1))
        kv.barrier()
        kv.close()
        return found

    codes = []
    for outcome in outcomes_with_servers(ranks, "abb", 2, work, env=FAST)[:3]:
        codes.append(outcome.exit_code)
        assert outcome.exit_code == -9 or outcome.result == -60, outcome.output
    assert codes == [0, -9, 0]


def test_a_worker_that_is_killed_ends_sync(ranks: Ranks) -> None:
    def work() -> Any:
        kv = allstep.kvstore.create("dist_sync")
        kv.init(1, torch.zeros(100_000))
        for step in range(20):
            if kv.rank == 2 and step == 5:
                os.kill(os.getpid(), 9)
            if step == 5:
                return outcome_of(lambda: kv.pushpull(1, torch.ones(100_000)))
            kv.pushpull(1, torch.ones(100_000))
        return None

    for outcome in outcomes_with_servers(ranks, "aab", 1, work, env=FAST)[:2]:
        assert outcome.exit_code == 0, outcome.output
        error, text, seconds = outcome.result
        assert error == "PeerLost" and "lost rank 2" in text and seconds < 20


def test_pushes_before_the_end_are_not_lost(ranks: Ranks) -> None:
    """A push has no answer; a worker that pushes and ends at once is no lost one."""

    def work() -> float:
        kv = allstep.kvstore.create("dist_async")
        kv.init(1, torch.zeros(2_000_000))
        kv.set_optimizer(torch.optim.SGD, lr=1.0)
        kv.barrier()
        if kv.rank:
            for _ in range(5):
                kv.push(1, torch.ones(2_000_000))
            kv.close()
            return 0.0
        kv.barrier()
        return number(pulled(kv, 1, (2_000_000,)))

    assert with_servers(ranks, "aab", 2, work) == [-10.0, 0.0, 0.0]


def test_more_servers_than_slices(ranks: Ranks) -> None:
    def work() -> None:
        with allstep.kvstore.create("dist_async") as kv:
            kv.init(1, torch.zeros(10))
            kv.barrier()

    outcomes = outcomes_with_servers(ranks, "ab", 3, work)
    assert [outcome.exit_code for outcome in outcomes[:2]] == [0, 0]
    text = (
        "3 servers, but the values have 1 slice: 2 of the servers store nothing; fewer servers do"
    )
    assert text in outcomes[0].output and text not in outcomes[1].output


def test_servers_that_do_not_start(ranks: Ranks) -> None:
    def work() -> None:
        with pytest.raises(CommError, match=r"server 0 did not start within 2 s"):
            allstep.kvstore.create("dist_async")

    env = {"ALLSTEP_SERVERS": "2", "ALLSTEP_START_TIMEOUT": "2"}
    ranks(2, work, env=env)
