"""Gradients: the shares of N workers give the gradient of one worker's whole batch."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

import allstep
import allstep.torch as hvd
from allstep.data import Loader
from allstep.data.order import Weights
from allstep.models import SmallCnn
from allstep.train.precision.precision import Precision
from allstep.train.step.step import Clock, Trainer, accumulate_gradients, step
from allstep.train.task.classification import Classification
from support.array_sources import Arrays

RANDOM = np.random.default_rng(0)
IMAGES = RANDOM.standard_normal((40, 1, 8, 8)).astype(np.float32)
LABELS = RANDOM.integers(0, 10, 40)
TASK = Classification(10)


def small_cnn(seed: int = 0) -> SmallCnn:
    torch.manual_seed(seed)
    return SmallCnn(10, (1, 8, 8), widths=(4, 8), hidden=16)


def oracle(count: int) -> list[torch.Tensor]:
    """Return the gradient of the mean loss over the first batch, by torch alone."""
    model = small_cnn()
    batch = next(Loader(Arrays(IMAGES, LABELS), batch=count, seed=1).batches())
    functional.cross_entropy(model(batch.data), batch.target).backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def trainer_of(model: SmallCnn, rate: float = 0.1, accumulation: int = 1) -> Trainer:
    hvd.init()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), rate),
        model.named_parameters(),
        backward_passes_per_step=accumulation,
    )
    return Trainer(
        model=model,
        task=TASK,
        optimizer=optimizer,
        lr=lambda seen: rate,
        to_input=lambda x: x,
        precision=Precision("float32", torch.device("cpu")),
        num_micro_batches=accumulation,
        size=hvd.size(),
    )


def shared_gradient(
    count: int, accumulation: int = 1, shares: Weights | None = None
) -> list[np.ndarray]:
    world = allstep.init()
    shares = shares or (1,) * world.size
    model = small_cnn().to(memory_format=torch.channels_last)
    trainer = trainer_of(model, accumulation=accumulation)
    trainer.shares = shares
    loader = Loader(Arrays(IMAGES, LABELS), batch=count, seed=1, world=world, shares=shares)
    batch = next(loader.batches())
    for _ in range(2):  # the second time checks that the first left nothing behind
        trainer.optimizer.zero_grad()
        tally = accumulate_gradients(trainer, batch, count)
        assert tally.count == batch.weight
        trainer.optimizer.synchronize()
    return [
        parameter.grad.numpy() for parameter in model.parameters() if parameter.grad is not None
    ]


@pytest.mark.parametrize(
    ("num_ranks", "count"), [(1, 40), (2, 40), (2, 7), (3, 40), (3, 2), (4, 1)]
)
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


@pytest.mark.parametrize(
    ("shares", "count", "accumulation"),
    [
        ((3, 1), 40, 1),
        ((1, 100), 40, 3),  # rank 0 has no sample
        ((5, 1, 2), 30, 4),  # rank 1 has fewer samples than micro-batches
    ],
)
def test_any_split_gives_the_gradient_of_one_worker(
    ranks: Any, shares: Weights, count: int, accumulation: int
) -> None:
    """Reference: torch on the whole batch."""
    expected = oracle(count)
    results = ranks(len(shares), shared_gradient, count, accumulation, shares)
    for gradients in results:
        for ours, theirs, first in zip(gradients, expected, results[0], strict=True):
            np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-4, atol=1e-6)
            np.testing.assert_array_equal(ours, first)


def calls_of_the_model(shares: Weights, count: int, accumulation: int, sync: bool) -> int:
    """Return how often this rank called the model in one step."""
    world = allstep.init()
    model = small_cnn()
    trainer = trainer_of(model, accumulation=accumulation)
    trainer.shares, calls = shares, []
    model.register_forward_hook(lambda *args: calls.append(len(args[1][0])))
    trainer.layers_communicate = sync
    loader = Loader(Arrays(IMAGES, LABELS), batch=count, seed=1, world=world, shares=shares)
    accumulate_gradients(trainer, next(loader.batches()), count)
    return len(calls)


@pytest.mark.parametrize(("sync", "expected"), [(True, [4, 4, 4]), (False, [4, 0, 1])])
def test_the_largest_share_gives_the_number_of_micro_batches(
    ranks: Any, sync: bool, expected: list[int]
) -> None:
    """Layers that communicate are called equally often, also by a rank without samples."""
    assert ranks(3, calls_of_the_model, (90, 1, 9), 10, 4, sync) == expected


def one_step() -> dict[str, float]:
    allstep.init()
    model = small_cnn()
    trainer = trainer_of(model, 0.25)
    clock = Clock()
    step(trainer, next(Loader(Arrays(IMAGES, LABELS), batch=40, seed=1).batches()), 40, clock)
    for ours, before, gradient in zip(
        model.parameters(), small_cnn().parameters(), oracle(40), strict=True
    ):
        torch.testing.assert_close(ours, before - 0.25 * gradient)
    return clock.seconds


def test_a_step_follows_the_gradient_at_the_scheduled_rate_and_measures_its_time(
    ranks: Any,
) -> None:
    (seconds,) = ranks(1, one_step)
    assert set(seconds) == {"input", "compute", "wait", "update"}
    assert all(spent > 0 for spent in seconds.values())
