"""Running statistics over workers, against one norm that is given the weighted mean."""

import pytest
import torch
from torch import nn

import allstep
from allstep.train.statistics import Statistics
from ranks import Ranks

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
            [inputs(rank, step, weights[rank]).double().mean((0, 2, 3)) for rank in range(size) if weights[rank]]
        )
        counts = torch.tensor([weight for weight in weights[:size] if weight], dtype=torch.double)
        running = (1 - momentum) * running + momentum * (counts[:, None] * means).sum(0) / counts.sum()
    torch.testing.assert_close(found[0]["running_mean"].double(), running, rtol=1e-5, atol=1e-6)
    assert found[0]["num_batches_tracked"] == 2


def inputs(rank: int, step: int, weight: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(weight, 3, 2, 2, generator=generator)


def mean_of_inputs() -> dict[str, torch.Tensor]:
    world = allstep.init()
    norm = nn.BatchNorm2d(3)
    statistics = Statistics(norm)
    weights = WEIGHTS if world.size > 1 else [4]
    for step in range(2):
        if weights[world.rank]:
            norm(inputs(world.rank, step, weights[world.rank]))
        statistics.average(weights[world.rank])
    statistics.average(0)  # a step without samples changes nothing
    return dict(norm.state_dict())


def test_a_net_without_such_norms_talks_to_nobody() -> None:
    Statistics(nn.Sequential(nn.Linear(2, 2), nn.GroupNorm(1, 2))).average(3)
