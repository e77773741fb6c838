"""Gradients: the shares of N workers give what one worker's whole batch gives."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

import allstep
from allstep.comm.buckets import GradientBuckets, broadcast_parameters
from allstep.data import Loader
from allstep.models import SmallCnn
from allstep.train.loop import Clock, Trainer, accumulate_gradients, step

RANDOM = np.random.default_rng(0)
IMAGES = RANDOM.standard_normal((40, 1, 8, 8)).astype(np.float32)
LABELS = RANDOM.integers(0, 10, 40)


def net(seed: int = 0) -> SmallCnn:
    torch.manual_seed(seed)
    return SmallCnn(10, (1, 8, 8), widths=(4, 8), hidden=16)


def oracle(count: int) -> list[torch.Tensor]:
    """The gradient of the mean loss over the first batch, by torch alone."""
    model = net()
    batch = next(Loader(IMAGES, LABELS, batch=count, seed=1).batches())
    functional.cross_entropy(model(batch.data), batch.target).backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def shared_gradient(count: int, accumulation: int = 1) -> list[np.ndarray]:
    world = allstep.init()
    model = net().to(memory_format=torch.channels_last)
    buckets = GradientBuckets(model.parameters())
    trainer = Trainer(
        model, torch.optim.SGD(model.parameters(), 0.1), buckets, lambda seen: 0.1, lambda x: x, accumulation
    )
    batch = next(Loader(IMAGES, LABELS, batch=count, seed=1, rank=world.rank, size=world.size).batches())
    for _ in range(2):  # the second time checks that the first left nothing behind
        buckets.zero()
        tally = accumulate_gradients(trainer, batch)
        assert tally.count == batch.weight
        assert buckets.reduce(batch.weight) == count
    return [parameter.grad.numpy() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize(("num_ranks", "count"), [(1, 40), (2, 40), (2, 7), (3, 40), (3, 2), (4, 1)])
def test_shares_add_up_to_the_whole(ranks: Any, num_ranks: int, count: int) -> None:
    """Uneven shares and empty ones included. Reference: torch on the whole batch."""
    expected = oracle(count)
    results = ranks(num_ranks, shared_gradient, count)
    for gradients in results:
        for ours, theirs, first in zip(gradients, expected, results[0], strict=True):
            np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-4, atol=1e-6)
            np.testing.assert_array_equal(ours, first)  # the same bits on every rank


def test_accumulation_changes_nothing(ranks: Any) -> None:
    expected = oracle(30)
    for gradients in ranks(2, shared_gradient, 30, 4):
        for ours, theirs in zip(gradients, expected, strict=True):
            np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-4, atol=1e-6)


def mixed_types() -> list[float]:
    world = allstep.init()
    singles, doubles = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2, 2, dtype=torch.float64))
    frozen = torch.nn.Parameter(torch.ones(1), requires_grad=False)
    buckets = GradientBuckets([singles, frozen, doubles])
    assert len(buckets.buffers) == 2
    ((world.rank + 1) * singles.sum() + 10 * (world.rank + 1) * doubles.sum().float()).backward()
    buckets.reduce(1)
    assert frozen.grad is None
    assert singles.grad is not None
    assert doubles.grad is not None
    return [singles.grad[0].item(), doubles.grad[1, 1].item()]


def test_one_buffer_per_type(ranks: Any) -> None:
    assert ranks(2, mixed_types) == [[1.5, 15.0]] * 2


def nobody_has_samples() -> list[float]:
    allstep.init()
    parameter = torch.nn.Parameter(torch.ones(2))
    buckets = GradientBuckets([parameter])
    assert buckets.reduce(0) == 0
    assert parameter.grad is not None
    return parameter.grad.tolist()


def test_no_samples_at_all_give_no_gradient(ranks: Any) -> None:
    assert ranks(2, nobody_has_samples) == [[0.0, 0.0]] * 2


def start_differently() -> bool:
    world = allstep.init()
    model = net(world.rank).to(memory_format=torch.channels_last)
    broadcast_parameters(model)
    return all(torch.equal(ours, theirs) for ours, theirs in zip(model.parameters(), net(0).parameters(), strict=True))


def test_all_ranks_start_with_the_weights_of_rank_0(ranks: Any) -> None:
    assert ranks(2, start_differently) == [True, True]


def one_step() -> dict[str, float]:
    allstep.init()
    model = net()
    trainer = Trainer(
        model,
        torch.optim.SGD(model.parameters(), 1.0),
        GradientBuckets(model.parameters()),
        lambda seen: 0.25,
        lambda x: x,
    )
    clock = Clock()
    step(trainer, next(Loader(IMAGES, LABELS, batch=40, seed=1).batches()), clock)
    for ours, before, gradient in zip(model.parameters(), net().parameters(), oracle(40), strict=True):
        torch.testing.assert_close(ours, before - 0.25 * gradient)
    return clock.seconds


def test_a_step_follows_the_gradient_at_the_scheduled_rate_and_says_where_its_time_went(ranks: Any) -> None:
    (seconds,) = ranks(1, one_step)
    assert set(seconds) == {"input", "compute", "wait", "update"}
    assert all(spent > 0 for spent in seconds.values())
