"""Running statistics over workers, compared with one norm that gets the weighted mean."""

import pytest
import torch
from torch import nn

import allstep
from allstep.train.step.after_step import AfterStep, StepOutcome, StepReport
from allstep.train.step.running_statistics import RunningStatistics
from support.ranks import Ranks
from support.scores import classified_tally

WEIGHTS = [6, 0, 2]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_they_are_equal_and_right(ranks: Ranks, size: int) -> None:
    found = ranks(size, mean_of_inputs)
    for statistics in found[1:]:
        assert statistics.keys() == found[0].keys()
        assert all(torch.equal(statistics[name], found[0][name]) for name in statistics)
    weights = WEIGHTS if size > 1 else [4]
    momentum, running = 0.1, torch.zeros(3, dtype=torch.double)
    for step in range(2):
        means = torch.stack(
            [
                inputs(rank, step, weights[rank]).double().mean((0, 2, 3))
                for rank in range(size)
                if weights[rank]
            ]
        )
        counts = torch.tensor([weight for weight in weights[:size] if weight], dtype=torch.double)
        running = (1 - momentum) * running + momentum * (counts[:, None] * means).sum(
            0
        ) / counts.sum()
    torch.testing.assert_close(found[0]["running_mean"].double(), running, rtol=1e-5, atol=1e-6)
    assert found[0]["num_batches_tracked"] == 2


def inputs(rank: int, step: int, weight: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(weight, 3, 2, 2, generator=generator)


def mean_of_inputs() -> dict[str, torch.Tensor]:
    world = allstep.init()
    norm = nn.BatchNorm2d(3)
    statistics = RunningStatistics(norm)
    weights = WEIGHTS if world.size > 1 else [4]
    for step in range(2):
        if weights[world.rank]:
            norm(inputs(world.rank, step, weights[world.rank]))
        statistics.average(weights[world.rank])
    statistics.average(0)  # a step without samples changes nothing
    return dict(norm.state_dict())


class Own(nn.Module):
    """Buffers of a user's model: changed in place, replaced twice in a step, counted, complex, and
    unchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("other", torch.ones(3))
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("highest", torch.tensor(-torch.inf))
        self.register_buffer("spectrum", torch.zeros(2, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> None:
        self.mean.mul_(0.9).add_(x.mean((0, 2, 3)), alpha=0.1)
        self.other = self.other + x.mean((0, 2, 3))
        self.other = self.other * 2
        self.seen += 1
        self.highest.fill_(3.0)
        self.spectrum += torch.tensor([1j, 2.0]) * x.mean()


def own_buffers() -> tuple[dict[str, torch.Tensor], list[float], int]:
    world = allstep.init()
    model, sums = Own(), []
    statistics = RunningStatistics(model)
    for step in range(2):
        if WEIGHTS[world.rank]:
            model(inputs(world.rank, step, WEIGHTS[world.rank]))
        sums = statistics.average(WEIGHTS[world.rank], [1.0, world.rank])
    version = model.mean._version
    statistics.average(WEIGHTS[world.rank])  # nothing was touched
    return dict(model.state_dict()), sums, model.mean._version - version


def test_buffers_of_a_users_model_are_equal_and_right(ranks: Ranks) -> None:
    found = ranks(3, own_buffers)
    for buffers, sums, changes in found:
        assert (sums, changes) == ([3.0, 3.0], 0)
        assert all(torch.equal(buffers[name], found[0][0][name]) for name in buffers)
    buffers, mean, spectrum = (
        found[0][0],
        torch.zeros(3, dtype=torch.double),
        torch.zeros(2, dtype=torch.complex128),
    )
    other = torch.ones(3, dtype=torch.double)
    for step in range(2):
        of_ranks = [
            inputs(rank, step, WEIGHTS[rank]).double().mean((0, 2, 3)) * WEIGHTS[rank] / 8
            for rank in (0, 2)
        ]
        mean, other = 0.9 * mean + 0.1 * sum(of_ranks), 2 * (other + sum(of_ranks))
        spectrum = spectrum + torch.tensor([1j, 2.0]) * sum(of_ranks).mean()
    torch.testing.assert_close(buffers["mean"].double(), mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(buffers["other"].double(), other, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        buffers["spectrum"].to(torch.complex128), spectrum, rtol=1e-5, atol=1e-6
    )
    assert (buffers["seen"], buffers["highest"], buffers["mask"].tolist()) == (
        2,
        3.0,
        [0.0, -torch.inf],
    )


def test_a_model_without_such_norms_does_not_communicate() -> None:
    RunningStatistics(nn.Sequential(nn.Linear(2, 2), nn.GroupNorm(1, 2))).average(3)


def reported(by_rank: bool) -> StepOutcome:
    world = allstep.init()
    fields = ("samples",) if by_rank else ()
    after = AfterStep(RunningStatistics(nn.BatchNorm2d(3)), world, fields)
    tally = classified_tally(1.0 + world.rank, 2.0, 3.0, WEIGHTS[world.rank])
    return after.exchange(StepReport(tally, WEIGHTS[world.rank], world.rank == 1, failed=False))


@pytest.mark.parametrize("by_rank", [False, True])
def test_all_ranks_learn_of_the_whole_step(ranks: Ranks, by_rank: bool) -> None:
    outcomes = ranks(3, reported, by_rank)
    for outcome in outcomes:
        assert outcome.tally.sums() == classified_tally(6.0, 6.0, 9.0, 8.0).sums()
        expected = StepOutcome(
            outcome.tally, stop=True, failed=False, samples=(6, 0, 2) if by_rank else ()
        )
        assert outcome == expected


def restored_buffers() -> list[dict[str, torch.Tensor]]:
    """Return the buffers after a whole step, and after further ones that failed.

    The second step fails before its sum, the third one after it, in the update.
    """
    world = allstep.init()
    model = nn.ModuleList([nn.BatchNorm2d(3), Own()])
    statistics = RunningStatistics(model, keeps=True)
    found = []
    for step in range(3):
        for module in model:
            module(inputs(world.rank, step, 2 + world.rank))
        if step != 1:
            statistics.average(2 + world.rank)
        if step == 0:
            statistics.keep()
        else:
            statistics.restore()
        found.append({name: value.clone() for name, value in model.state_dict().items()})
    return found


def test_a_step_that_failed_leaves_the_buffers_of_the_last_whole_one(ranks: Ranks) -> None:
    for whole, *others in ranks(2, restored_buffers):
        assert len(others) == 2
        for restored in others:
            assert whole.keys() == restored.keys()
            for name, value in whole.items():
                assert torch.equal(value, restored[name]), name
