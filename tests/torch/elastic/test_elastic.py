"""Elastic states of torch in a fixed world: commit, restore, sync, the sampler, and the loop after
an error that all ranks survive."""

import math
import os
import signal
from typing import Any

import pytest
import torch
from torch import nn

import allstep.torch as hvd
from allstep.hvd.elastic import HostUpdateResult
from allstep.torch.elastic import ElasticSampler, TorchState
from allstep.torch.elastic.state import StateHandler, get_handler_registry, set_handler_registry
from support.hvd_ranks import in_worlds, run_checks, running
from support.ranks import Ranks


def test_what_it_exports() -> None:
    assert sorted(hvd.elastic.__all__) == ["ElasticSampler", "TorchState", "run"]


@in_worlds
def test_state(ranks: Ranks, hosts: list[str]) -> None:
    run_checks(ranks, hosts, keep_state)


def keep_state(rank: int, size: int) -> None:
    torch.manual_seed(rank)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (rank + 1), momentum=0.9)
    sampler = ElasticSampler(range(20), shuffle=False)
    state = TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=rank, note=None)
    assert state.model is model and state.optimizer is optimizer and state.note is None
    with pytest.raises(
        AttributeError, match="no 'modle'; it has model, optimizer, sampler, epoch, note"
    ):
        _ = state.modle
    sampler.record_batch(0, rank + 1)
    state.sync()
    roots = hvd.allgather_object({**model.state_dict()})[0]
    torch.testing.assert_close(dict(model.state_dict()), roots, rtol=0, atol=0)
    assert (optimizer.param_groups[0]["lr"], state.epoch) == (0.1, 0)
    assert sampler.processed_num == size  # rank 0's

    train(state)
    state.epoch = 5
    sampler.record_batch(1, 1)
    state.restore()
    torch.testing.assert_close(dict(model.state_dict()), roots, rtol=0, atol=0)
    assert state.epoch == 0 and sampler.processed_num == size
    assert not optimizer.state_dict()["state"]

    train(state)
    state.epoch = 6
    committed = {name: value.clone() for name, value in model.state_dict().items()}
    state.commit()
    train(state)
    state.restore()
    torch.testing.assert_close(dict(model.state_dict()), committed, rtol=0, atol=0)
    assert state.epoch == 6
    assert optimizer.state_dict()["state"]

    scheduled = TorchState(scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 1 + rank))
    optimizer.step()
    scheduled.scheduler.step()
    scheduled.sync()
    assert scheduled.scheduler.step_size == 1 and scheduled.scheduler.last_epoch == 1
    scheduled.scheduler.step()
    scheduled.restore()
    assert scheduled.scheduler.last_epoch == 1 and scheduled.scheduler.optimizer is optimizer

    other = nn.Linear(2, 1)
    state.model = other  # from now on that one, saved as it is
    before = other.weight.clone()
    with torch.no_grad():
        other.weight.add_(1)
    state.restore()
    assert state.model is other and torch.equal(other.weight, before)


def train(state: Any) -> None:
    state.optimizer.zero_grad()
    state.model(torch.ones(3, 2)).sum().backward()
    state.optimizer.step()


class Box:
    def __init__(self, content: int) -> None:
        self.content = content


class BoxHandler(StateHandler):
    def __init__(self, value: Box) -> None:
        super().__init__(value)
        self.save()

    def save(self) -> None:
        self.saved = self.value.content

    def restore(self) -> None:
        self.value.content = self.saved

    def sync(self) -> None:
        self.value.content = hvd.broadcast_object(self.value.content)


def test_handlers_of_the_user(ranks: Ranks) -> None:
    ranks(2, use_own_handler)


def use_own_handler() -> None:
    set_handler_registry([(Box, BoxHandler), *get_handler_registry()])
    with running() as (rank, _):
        state = TorchState(box=Box(rank + 3))
        state.sync()
        assert state.box.content == 3
        state.box.content = 9
        state.restore()
        assert state.box.content == 3


@pytest.mark.parametrize("size", [1, 2, 3])
def test_sampler(ranks: Ranks, size: int) -> None:
    parts = ranks(size, sample)
    for epoch in range(2):
        whole = [index for rank in range(size) for index in parts[rank][epoch]]
        assert set(whole) == set(range(17))
        assert len(whole) == size * math.ceil(17 / size)
    assert parts[0][0] != parts[0][1]  # another order
    rest = [index for rank in range(size) for index in parts[rank][2]]
    seen = [index for rank in range(size) for index in parts[rank][1][:3]]
    assert set(rest) == set(range(17)) - set(seen)


def sample() -> list[list[int]]:
    with running() as (_, size):
        sampler = ElasticSampler(range(17), seed=4)
        assert len(sampler) == sampler.num_samples == math.ceil(17 / size)
        assert sampler.total_size == size * sampler.num_samples
        first = list(sampler)
        assert first == list(sampler)
        sampler.set_epoch(1)
        second = list(sampler)
        sampler.record_batch(0, 3)
        assert sampler.state_dict() == {"epoch": 1, "processed_num": 3 * size}
        again = ElasticSampler(range(17), seed=4)
        again.load_state_dict(sampler.state_dict())
        rest = list(again)
        sampler.processed_num = 17
        sampler.reset()
        assert list(sampler) == [] and len(sampler) == 0
        return [first, second, rest]


def test_the_loop_goes_on_after_an_error(ranks: Ranks) -> None:
    """Batch 2 fails once, on all ranks; batch 4 hears of new hosts.

    All ranks leave and join again.
    """
    assert ranks(2, go_on) == [([0, 1, 2, 2, 3, 4, 5], 2)] * 2


def go_on() -> tuple[list[int], int]:
    log: list[int] = []
    resets: list[int] = []
    failures = [2]

    @hvd.elastic.run
    def train_all(state: Any) -> list[int]:
        while state.batch < 6:
            log.append(state.batch)
            different = hvd.rank() if state.batch in failures and failures.pop() else 0
            hvd.allreduce(torch.ones(1 + different), name="loss")
            if state.batch == 4 and hvd.rank() == 0 and len(resets) == 1:
                state.on_hosts_updated(1, HostUpdateResult.added)
            state.batch += 1
            state.commit()
        return log

    hvd.init()
    state = TorchState(batch=0)
    state.register_reset_callbacks([lambda: resets.append(hvd.size())])
    result = train_all(state)
    hvd.barrier()
    hvd.shutdown()
    assert resets == [2, 2]
    return result, len(resets)


def test_a_lost_rank_ends_the_loop_and_is_named(ranks: Ranks) -> None:
    """Nobody replaces it yet: the new world does not come about."""
    outcomes = ranks.outcomes(3, lose_rank_1, env={"ALLSTEP_START_TIMEOUT": "4"})
    assert outcomes[1].exit_code == -signal.SIGKILL
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.exit_code == 1, outcome.output
        assert "rank 1" in outcome.output.splitlines()[-1], outcome.output
        assert "WorldError" in outcome.output.splitlines()[-1], outcome.output


def lose_rank_1() -> None:
    @hvd.elastic.run
    def train_all(state: Any) -> None:
        if hvd.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        hvd.allreduce(torch.ones(1), name="loss")

    hvd.init()
    train_all(TorchState(batch=0))
