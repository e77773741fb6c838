"""Noise on gradients and on samples: its variance against the formulas, the same bits again, one
worker against two."""

import itertools
import math

import pytest
import torch
from torch import nn

from allstep.errors import ConfigError
from allstep.optim import (
    NoisyGradients,
    generator,
    noise_variance,
    sample_weights,
    seed_step,
    step_seed,
)
from support.hvd_ranks import running
from support.ranks import Ranks


def weights() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(shape)) for shape in ((100, 50), (1000,), ())]


def noisy(seed: int = 0, eta: float = 0.3) -> tuple[list[nn.Parameter], NoisyGradients]:
    params = [
        *weights(),
        nn.Parameter(torch.zeros(1000, dtype=torch.float64)),
        nn.Parameter(torch.zeros(3)),
    ]
    for param in params[:-1]:  # the last one has no gradient
        param.grad = torch.full_like(param, 2.0)
    return params, NoisyGradients(torch.optim.SGD(params, 1.0), batch=10, seed=seed, eta=eta)


def test_additive_noise_has_its_variance() -> None:
    """eta / (1 + t)^0.55; the step count is samples over the batch."""
    for seen, expected in ((0, 0.3), (70, 0.3 / 8**0.55)):
        params, optimizer = noisy()
        optimizer.step(seen)
        drawn = torch.cat([-param.detach().double().flatten() for param in params[:-1]])
        assert optimizer.variance(seen) == pytest.approx(expected)
        assert drawn.mean().item() == pytest.approx(2.0, abs=5 * math.sqrt(expected / len(drawn)))
        assert drawn.var().item() == pytest.approx(expected, rel=0.1)
        assert (params[-1] == 0).all()


def test_additive_noise_is_of_seed_and_position() -> None:
    def after(seed: int, seen: int) -> torch.Tensor:
        params, optimizer = noisy(seed)
        optimizer.step(seen)
        return params[0].detach()

    assert torch.equal(after(1, 20), after(1, 20))
    assert not torch.equal(after(1, 20), after(1, 30))
    assert not torch.equal(after(1, 20), after(2, 20))
    still, optimizer = noisy(eta=0.0)
    assert optimizer.step(0, lambda: 7.0) == 7.0
    assert (still[0] == -2.0).all()


def test_the_wrapper_is_the_optimizer_otherwise() -> None:
    params, optimizer = noisy()
    optimizer.zero_grad()
    assert params[0].grad is None
    assert optimizer.param_groups[0]["lr"] == 1.0
    assert optimizer.state_dict()["param_groups"][0]["lr"] == 1.0


def two_steps(optimizer: NoisyGradients, param: nn.Parameter, share: torch.Tensor) -> None:
    for seen in (0, 6):
        optimizer.zero_grad()
        optimizer.weight = len(share)  # a DistributedOptimizer weights by it
        (param * share).sum(1).mean().backward()
        optimizer.step(seen)


def test_additive_noise_is_the_same_on_all_ranks(ranks: Ranks) -> None:
    def work() -> None:
        import allstep.torch as hvd

        data = torch.arange(30.0, dtype=torch.float64).view(6, 5)
        alone = nn.Parameter(torch.zeros(5, dtype=torch.float64))
        two_steps(
            NoisyGradients(torch.optim.SGD([alone], 0.1, momentum=0.9), batch=6, seed=3),
            alone,
            data,
        )
        with running():
            for share_weights in (False, True):
                param = nn.Parameter(torch.zeros(5, dtype=torch.float64))
                wrapped = hvd.DistributedOptimizer(
                    torch.optim.SGD([param], 0.1, momentum=0.9),
                    [("w", param)],
                    share_weights=share_weights,
                )
                mine = data[:2] if hvd.rank() == 0 else data[2:]
                two_steps(NoisyGradients(wrapped, batch=6, seed=3), param, mine)
                torch.testing.assert_close(param.detach(), alone.detach(), rtol=0, atol=1e-10)
                hvd.barrier()

    ranks(2, work)


def test_weights_of_samples() -> None:
    variance = noise_variance(batch=4096, like=128)
    assert variance == 31.0
    assert noise_variance(batch=64, like=128) == 0.0
    drawn = sample_weights(20_000, variance, generator(0, 4096, 1))
    assert drawn.mean().item() == pytest.approx(1.0, abs=0.2)
    assert drawn.var().item() == pytest.approx(31.0, rel=0.05)
    assert torch.equal(drawn, sample_weights(20_000, variance, generator(0, 4096, 1)))
    assert not torch.equal(drawn, sample_weights(20_000, variance, generator(0, 4096, 2)))
    assert (sample_weights(5, 0.0, generator(0, 0)) == 1.0).all()


def test_weights_give_a_large_batch_the_noise_of_a_small_one() -> None:
    """Gradients of mean zero, 512 a batch, as noisy as batches of 16: the variance of the mean is 1
    / 16."""
    stream = generator(1, 0)
    data = torch.randn(2000, 512, generator=stream)
    z = sample_weights(data.numel(), noise_variance(512, 16), stream).view_as(data)
    assert (data * z).mean(1).var().item() == pytest.approx(1 / 16, rel=0.15)


def test_what_is_refused() -> None:
    optimizer = torch.optim.SGD(weights(), 1.0)
    for options in ({"batch": 0}, {"eta": -1.0}, {"gamma": -1.0}):
        with pytest.raises(ConfigError, match=next(iter(options))):
            NoisyGradients(optimizer, **{"batch": 1, "seed": 0, **options})
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ConfigError, match=r"dense gradients; one of shape \[4, 2\]"):
        NoisyGradients(torch.optim.SGD(table.parameters(), 1.0), batch=1, seed=0).step(0)
    with pytest.raises(ConfigError, match="none below 0"):
        generator(0, -1)
    with pytest.raises(ConfigError, match="variance of -1"):
        sample_weights(3, -1.0, generator(0, 0))
    with pytest.raises(ConfigError, match="at least 1"):
        noise_variance(0, 1)


def test_seeds_of_steps_are_far_apart_and_dropout_follows_them() -> None:
    seeds = [
        step_seed(seed, seen, rank)
        for seed in range(8)
        for seen in range(0, 64, 4)
        for rank in range(4)
    ]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= each < 2**63 for each in seeds)
    flips = [(first ^ second).bit_count() for first, second in itertools.pairwise(seeds)]
    assert 30 < sum(flips) / len(flips) < 33  # of 63 bits
    drawn = []
    for seen in (128, 256, 128):
        seed_step(7, seen, 1)
        drawn.append(torch.rand(4).tolist())
    assert drawn[0] == drawn[2] != drawn[1]
    assert torch.initial_seed() == step_seed(7, 128, 1)
