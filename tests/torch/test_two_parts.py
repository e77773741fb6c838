"""A step in two parts, `reduce_gradients` and `apply`, with norms and clipping:

N workers against plain torch in one process.
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from allstep.errors import ConfigError, UserError
from allstep.optim import LAMB, LARS, groups
from allstep.optim.noise_scale import Running, from_workers
from support.hvd_ranks import in_worlds, run_checks, running
from support.ranks import Ranks

DATA = torch.randn(6, 11, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
CLIPPED = 1.5  # above the norms of some steps, below others


def model() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)),
        nn.Conv2d(1, 4, 2),
        nn.Flatten(),
        nn.Linear(8, 40),
        nn.Tanh(),
        nn.Linear(40, 1),
    )
    net[1].to(memory_format=torch.channels_last)
    return net.double()


def backward(net: nn.Module, data: Tensor) -> None:
    if len(data):
        (net(data) - data.sum(1, keepdim=True).sin()).square().mean().backward()


def optimizer_of(net: nn.Module, share_weights: bool) -> Any:
    import allstep.torch as hvd

    plain = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    return hvd.DistributedOptimizer(plain, net.named_parameters(), share_weights=share_weights)


def squared(net: nn.Module) -> float:
    return sum(float(p.grad.square().sum()) for p in net.parameters() if p.grad is not None)


# Against one process with the whole batch


def shares(data: Tensor, size: int) -> list[Tensor]:
    """Uneven ones; of three ranks the last has nothing."""
    cuts = {1: [11], 2: [3, 8], 3: [4, 7, 0]}[size]
    return list(data.split(cuts))


@in_worlds
def test_as_one_worker(ranks: Ranks, hosts: list[str]) -> None:
    """Norms of each rank's own gradient and of the mean, the clipped weights, and losses of plain
    torch: to 1e-9 in float64."""
    run_checks(
        ranks, hosts, clipped_and_measured, measured_alone, not_finite, compressed, nothing_asked
    )


def clipped_and_measured(rank: int, size: int) -> None:
    for share_weights in (False, True):
        net, reference, probe = model(), model(), model()
        optimizer, plain = (
            optimizer_of(net, share_weights),
            torch.optim.SGD(reference.parameters(), 0.1, momentum=0.9),
        )
        optimizer.clip_norm, optimizer.measure_norms = CLIPPED, True
        were_clipped = set()
        for data in DATA:
            own = []
            for share in shares(data, size):
                probe.load_state_dict(reference.state_dict())
                probe.zero_grad()
                backward(probe, share)
                own.append(squared(probe))
            plain.zero_grad()
            backward(reference, data)
            norm = nn.utils.clip_grad_norm_(reference.parameters(), CLIPPED).item()
            were_clipped.add(norm > CLIPPED)
            plain.step()

            mine = shares(data, size)[rank]
            optimizer.zero_grad()
            optimizer.weight = len(mine)
            backward(net, mine)
            optimizer.reduce_gradients()
            optimizer.apply()
            assert optimizer.norms.own == pytest.approx(own, rel=1e-9, abs=1e-12)
            assert optimizer.norms.weights == tuple(len(share) for share in shares(data, size))
            assert optimizer.norms.mean == pytest.approx(norm**2, rel=1e-9)
        assert were_clipped == {True, False}
        for ours, theirs in zip(net.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=0, atol=1e-10)


def measured_alone(rank: int, size: int) -> None:
    """Each asked for without the other: only the mean is measured for clipping; `step` and
    `synchronize` do both as well."""
    for share_weights in (False, True):
        net = model()
        optimizer = optimizer_of(net, share_weights)
        for clip_norm, measure in ((None, True), (1e-3, False), (None, False)):
            optimizer.clip_norm, optimizer.measure_norms = clip_norm, measure
            before = squared_of_steps = None
            for whole in (True, False):
                optimizer.zero_grad()
                backward(net, DATA[0])
                if whole:
                    optimizer.synchronize()
                    before = optimizer.norms
                    squared_of_steps = squared(net)
                    optimizer._forget_reduced()
                else:
                    optimizer.step()
            if clip_norm is None and not measure:
                assert optimizer.norms is None
                continue
            assert before is not None
            assert optimizer.norms.mean == pytest.approx(before.mean, rel=1e-9)
            assert len(before.own) == (size if measure else 0)
            assert before.weights == (1.0,) * size
            expected = min(before.mean, math.inf if clip_norm is None else clip_norm**2)
            assert squared_of_steps == pytest.approx(expected, rel=1e-2)


def not_finite(rank: int, size: int) -> None:
    """No error and no clipping: the loop looks at the norms, which all ranks have alike, and leaves
    the step."""
    for share_weights in (False, True):
        net = model()
        optimizer = optimizer_of(net, share_weights)
        optimizer.clip_norm, optimizer.measure_norms = 0.1, True
        for bad in (math.inf, math.nan):
            optimizer.zero_grad()
            bad_row = torch.zeros_like(net[3].weight).index_fill(
                0, torch.tensor(1), bad if rank == size - 1 else 0.0
            )
            hook = net[3].weight.register_hook(
                bad_row.add
            )  # after backward() it may have left already
            backward(net, DATA[0])
            hook.remove()
            optimizer.reduce_gradients()
            assert not math.isfinite(optimizer.norms.mean)
            assert [math.isfinite(each) for each in optimizer.norms.own] == [True] * (size - 1) + [
                False
            ]
            optimizer.discard()
        optimizer.zero_grad()
        backward(net, DATA[0])
        optimizer.reduce_gradients()
        optimizer.apply()
        assert all(p.isfinite().all() for p in net.parameters())


def compressed(rank: int, size: int) -> None:
    """Norms are of the gradients themselves, before they are made small and after."""
    import allstep.torch as hvd

    weight = nn.Parameter(torch.zeros(10))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([weight], 1.0), compression=hvd.Compression.fp16
    )
    optimizer.measure_norms = True
    (weight * 2.0 ** (rank + 1)).sum().backward()
    optimizer.reduce_gradients()
    optimizer.apply()
    assert optimizer.norms.own == tuple(10 * 4.0 ** (each + 1) for each in range(size))
    assert optimizer.norms.mean == pytest.approx(
        10 * (sum(2.0 ** (each + 1) for each in range(size)) / size) ** 2, rel=2e-3
    )


def nothing_asked(rank: int, size: int) -> None:
    net = model()
    optimizer = optimizer_of(net, False)
    backward(net, DATA[0])
    optimizer.reduce_gradients()
    assert optimizer.norms is None
    optimizer.apply()
    for limit in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ConfigError, match=r"clip_norm=.*: it must be above 0"):
            optimizer.clip_norm = limit


def test_sparse_gradients_count(ranks: Ranks) -> None:
    """They travel by themselves; measured and clipped like the dense ones beside them."""

    def check(hvd: Any, **options: bool) -> None:
        table, dense = nn.Embedding(10, 3, sparse=True), nn.Parameter(torch.zeros(2))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([table.weight, dense], 1.0), **options)
        optimizer.measure_norms, optimizer.clip_norm = True, 0.5
        before = table.weight.detach().clone()
        rows = torch.tensor([hvd.rank(), 5, 5])
        (table(rows).sum() + dense.sum()).backward()
        optimizer.step()
        own = 3 * 1 + 3 * 2**2 + 2
        mean = 3 * 2 * 0.5**2 + 3 * 2**2 + 2
        assert optimizer.norms.own == pytest.approx((own, own))
        assert optimizer.norms.mean == pytest.approx(mean)
        factor = 0.5 / math.sqrt(mean)
        torch.testing.assert_close((before - table.weight)[5], torch.full((3,), 2 * factor))
        torch.testing.assert_close(dense.detach(), torch.full((2,), -factor))
        hvd.barrier()  # with shared weights nobody looks while another goes on

    def work() -> None:
        import allstep.torch as hvd

        with running():
            check(hvd)
            check(hvd, sparse_as_dense=True)

    ranks(2, work)


def test_norms_after_a_rank_has_joined(ranks: Ranks) -> None:
    def work() -> None:
        import allstep.torch as hvd

        with running():
            weight = nn.Parameter(torch.zeros(300_000))
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD([weight], 1.0), [("weight", weight)]
            )
            optimizer.measure_norms = True
            for step in range(2 * hvd.rank() + 1):
                optimizer.zero_grad()
                weight.sum().backward()
                optimizer.step()
                present = 3 - (step + 1) // 2
                assert optimizer.norms.weights == (0.0,) * (3 - present) + (1.0,) * present
                assert optimizer.norms.own == tuple(
                    300_000 * each for each in optimizer.norms.weights
                )
                assert optimizer.norms.mean == pytest.approx(
                    300_000 * (present / 3) ** 2, rel=1e-3
                )  # Horovod divides by all
            hvd.join()

    ranks(3, work)


# What they are for


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_noise_scale_of_a_known_problem(ranks: Ranks, num_ranks: int) -> None:
    """Samples whose gradients are drawn around a known one: |G|^2 and tr(Sigma) are known, and come
    out of the real buckets."""
    size, true, spread, steps = 3000, 0.05, 0.4, 60

    def work(share_weights: bool) -> None:
        import allstep.torch as hvd

        with running() as (rank, _):
            weights = [nn.Parameter(torch.zeros(size - 700)), nn.Parameter(torch.zeros(7, 100))]
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD(weights, 0.0), share_weights=share_weights
            )
            optimizer.measure_norms = True
            running_scale = Running(decay=1.0)
            counts = [5, 12, 20][:num_ranks]
            for step in range(steps):
                generator = torch.Generator().manual_seed(1000 * step + rank)
                samples = true + spread * torch.randn(counts[rank], size, generator=generator)
                optimizer.zero_grad()
                optimizer.weight = counts[rank]
                (samples @ torch.cat([weight.flatten() for weight in weights])).mean().backward()
                optimizer.reduce_gradients()
                optimizer.apply()
                norms = optimizer.norms
                running_scale.add(from_workers(norms.own, norms.weights, norms.mean))
            assert running_scale.gradient_sq == pytest.approx(size * true**2, rel=0.05)
            assert running_scale.noise == pytest.approx(size * spread**2, rel=0.02)
            assert running_scale.scale == pytest.approx((spread / true) ** 2, rel=0.05)

    for share_weights in (False, True):
        ranks(num_ranks, work, share_weights)


@in_worlds
def test_trust_ratios_of_all_layers(ranks: Ranks, hosts: list[str]) -> None:
    run_checks(ranks, hosts, trust_ratios)


def trust_ratios(rank: int, size: int) -> None:
    """Rank 0 has those of one process with the whole batch, whoever owns the layers."""
    import allstep.torch as hvd

    for kind in (LARS, LAMB):
        net, reference = model(), model()
        plain = kind(groups(reference), 0.05)
        optimizer = hvd.DistributedOptimizer(
            kind(groups(net), 0.05), net.named_parameters(), share_weights=True
        )
        assert optimizer.trust_ratios() == {}  # before the first step
        for data in DATA[:2]:
            plain.zero_grad()
            backward(reference, data)
            plain.step()
            optimizer.zero_grad()
            optimizer.weight = len(shares(data, size)[rank])
            backward(net, shares(data, size)[rank])
            optimizer.reduce_gradients()
            optimizer.apply()
            expected = plain.trust_ratios()
            assert len(expected) == 3
            assert optimizer.trust_ratios() == (
                pytest.approx(expected, rel=1e-9) if rank == 0 else {}
            )
    assert not hasattr(optimizer_of(model(), True), "trust_ratios")


# Wrong use


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_one_without_the_other(ranks: Ranks, num_ranks: int) -> None:
    def check(share_weights: bool) -> None:
        net = model()
        optimizer = optimizer_of(net, share_weights)
        for name in ("apply", "discard"):
            with pytest.raises(UserError, match=rf"{name}\(\): there are no reduced gradients"):
                getattr(optimizer, name)()
        backward(net, DATA[0])
        optimizer.reduce_gradients()
        for name in ("reduce_gradients", "step", "synchronize"):
            with pytest.raises(
                UserError, match=rf"{name}\(\) after optimizer.reduce_gradients\(\)"
            ):
                getattr(optimizer, name)()
        before = [parameter.detach().clone() for parameter in net.parameters()]
        optimizer.discard()
        assert all(map(torch.equal, before, net.parameters()))
        optimizer.zero_grad()
        backward(net, DATA[0])
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        optimizer.reduce_gradients()
        optimizer.apply()
        scheduler.step()  # does not warn that there was no step
        assert not any(map(torch.equal, before, net.parameters()))
        with pytest.raises(UserError, match=r"apply\(\): there are no reduced gradients"):
            optimizer.apply()
        optimizer.zero_grad()
        backward(net, DATA[0])
        optimizer.synchronize()
        with pytest.raises(
            UserError, match=r"reduce_gradients\(\) after optimizer.synchronize\(\)"
        ):
            optimizer.reduce_gradients()

    def work() -> None:
        with running():
            for share_weights in (False, True):
                check(share_weights)

    ranks(num_ranks, work)
