"""kill -9 of servers: another one continues their parts, in dist_async and dist_stale."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import allstep.kvstore
from allstep.errors import PeerLost
from support.ranks import Outcome, Ranks
from support.store_servers import kill_server, outcomes_with_servers

FAST = {"ALLSTEP_LOST_SECONDS": "4"}
NUMEL = 1_500_000


def made(name: str, **settings: Any) -> Any:
    kv = allstep.kvstore.create(name)
    kv.init([1, 2], [torch.zeros(NUMEL), torch.zeros(8)])
    kv.set_optimizer(torch.optim.SGD, lr=1.0, **settings)
    return kv


def pulled(kv: Any) -> Tensor:
    out, small = torch.empty(NUMEL), torch.empty(8)
    kv.pull([1, 2], out=[out, small])
    return torch.cat([out, small])


def of_workers(outcomes: list[Outcome]) -> list[Any]:
    """The results of the workers; all servers but those that were killed ended in order."""
    output = "\n".join(each.output for each in outcomes)
    codes = [each.exit_code for each in outcomes]
    num_workers = next(n for n, each in enumerate(outcomes) if each.result is None)
    assert codes[:num_workers] == [0] * num_workers, output
    assert set(codes[num_workers:]) <= {0, -9}, output
    return [each.result for each in outcomes[:num_workers]]


def pull_for_a_minute(kv: Any) -> None:
    began = time.monotonic()
    while time.monotonic() < began + 60:
        pulled(kv)


@pytest.mark.parametrize(
    ("name", "codec"), [("dist_async", ""), ("dist_stale:4", ""), ("dist_async", "bf16")]
)
def test_two_of_three_servers_are_lost_one_after_the_other(
    ranks: Ranks, name: str, codec: str
) -> None:
    """What was pulled before a loss is not lost, and after a failover each push counts again."""

    def work() -> Any:
        kv = allstep.kvstore.create(name)
        kv.init([1, 2], [torch.zeros(NUMEL), torch.zeros(8)])
        if codec:
            kv.set_gradient_compression({"type": codec, "pull": codec})
        kv.set_optimizer(torch.optim.SGD, lr=1.0)
        size, longest = kv.num_workers, 0.0

        def push(times: int) -> Tensor:
            nonlocal longest
            for _ in range(times):
                began = time.monotonic()
                outs = [torch.empty(NUMEL), torch.empty(8)]
                kv.pushpull([1, 2], [-torch.ones(NUMEL), -torch.ones(8)], out=outs)
                longest = max(longest, time.monotonic() - began)
            kv.barrier()
            found = pulled(kv)
            kv.barrier()
            return found

        before = push(3)
        assert before.unique().tolist() == [3 * size]
        for victim in (1, 0):
            if kv.rank == 0:
                kill_server(victim)
            after = push(3)
            assert (after >= before).all() and (after <= before + 3 * size).all()
            before = push(2)
            assert (before == after + 2 * size).all(), "all workers read the same"
        with pytest.raises(PeerLost, match="new keys and a new optimizer need all servers"):
            kv.init(3, torch.zeros(1))
        kv.close()
        return longest

    outcomes = outcomes_with_servers(ranks, "abb", 3, work, env=FAST)
    assert max(of_workers(outcomes)) < 20
    lines = "".join(each.output for each in outcomes[3:])
    assert "lost server 1 on" in lines and "lost server 0 on" in lines
    assert "from the copy of rank" in lines and "updates are lost" in lines


def test_momentum_comes_from_the_states_that_were_saved_last(ranks: Ranks, tmp_path: Path) -> None:
    def work() -> list[float]:
        kv = made("dist_async", momentum=0.5)
        if kv.rank == 0:
            kv.push([1, 2], [-torch.ones(NUMEL), -torch.ones(8)])
            kv.save_optimizer_states(tmp_path / "states")
        kv.barrier()
        assert pulled(kv).unique().tolist() == [1.0]
        kv.barrier()
        if kv.rank == 0:
            kill_server(1)
            pulled(kv)
            kv.push([1, 2], [torch.zeros(NUMEL), torch.zeros(8)])
        kv.barrier()
        found: list[float] = pulled(kv).unique().tolist()
        kv.barrier()
        kv.close()
        return found

    # Without the state of the lost server its parts would stay at 1.
    assert of_workers(outcomes_with_servers(ranks, "ab", 2, work, env=FAST)) == [[1.5], [1.5]]


def test_the_last_server_is_not_replaced(ranks: Ranks) -> None:
    def work() -> Any:
        kv = made("dist_async")
        pulled(kv)
        kv.barrier()
        if kv.rank == 0:
            kill_server(1)
            pulled(kv)
            kill_server(0)
        with pytest.raises(PeerLost, match="the last server") as error:
            pull_for_a_minute(kv)
        with pytest.raises(PeerLost):
            kv.barrier()
        kv.close()
        return str(error.value)

    for text in of_workers(outcomes_with_servers(ranks, "ab", 2, work, env=FAST)):
        assert "start again from a checkpoint" in text
