"""GhostBatchNorm against torch's BatchNorm on each part: outputs, all gradients, running
statistics. And `convert`."""

import warnings
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import allstep.torch as hvd
from allstep.errors import ConfigError
from allstep.norm import GhostBatchNorm, SyncBatchNorm, convert
from allstep.norm.ghost import num_parts, parts_of_ranks
from support.hvd_ranks import running
from support.ranks import Ranks

OPTIONS: list[dict[str, Any]] = [
    {},
    {"momentum": None},
    {"affine": False, "eps": 0.1},
    {"track_running_stats": False},
]


def batch(count: int, shape: tuple[int, ...] = (3, 2), seed: int = 0) -> Tensor:
    return (
        torch.randn(
            count, 3, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
        )
        * 3
        + 7
    )


def compare(
    ours: nn.Module, theirs: nn.Module, data: Tensor, sizes: list[int], mine: slice = slice(None)
) -> None:
    """Ours on (a part of) the data, against torch's on parts of these sizes, one after the other;
    then both in evaluation."""
    own, whole = data[mine].clone().requires_grad_(), data.clone().requires_grad_()
    weight = torch.linspace(-1, 2, data.numel(), dtype=torch.float64).view(data.shape).sin()
    output, expected = ours(own), torch.cat([theirs(part) for part in whole.split(sizes)])
    (output * weight[mine]).sum().backward()
    (expected * weight).sum().backward()
    torch.testing.assert_close(output, expected[mine], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(own.grad, whole.grad[mine], rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(
        dict(ours.state_dict()), dict(theirs.state_dict()), rtol=1e-10, atol=1e-10
    )


def check_weights(ours: nn.Module, theirs: nn.Module) -> None:
    for param, reference in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(
            hvd.allreduce(param.grad, op=hvd.Sum), reference.grad, rtol=1e-9, atol=1e-9
        )


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_as_small_batches(options: dict[str, Any]) -> None:
    """Twelve samples by four are three small batches, to the running statistics too."""
    ours, theirs = GhostBatchNorm(3, 4, **options).double(), nn.BatchNorm2d(3, **options).double()
    for step in range(3):
        compare(ours, theirs, batch(12, seed=step), [4, 4, 4])
    for param, reference in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(param.grad, reference.grad)
    ours.eval(), theirs.eval()
    compare(ours, theirs, batch(5), [5])


@pytest.mark.parametrize(("count", "sizes"), [(11, [4, 4, 3]), (9, [5, 4]), (5, [5]), (2, [2])])
def test_a_size_that_does_not_divide(count: int, sizes: list[int]) -> None:
    ours, theirs = GhostBatchNorm(3, 4).double(), nn.BatchNorm1d(3).double()
    compare(ours, theirs, batch(12, ()), [4, 4, 4])  # a first batch that is large enough
    compare(ours, theirs, batch(count, ()), sizes)


@given(num_samples=st.integers(1, 5000), ghost=st.integers(2, 600))
def test_parts_are_near_the_size_asked_for(num_samples: int, ghost: int) -> None:
    parts = num_parts(num_samples, ghost)
    smallest, largest = num_samples // parts, -(-num_samples // parts)
    assert smallest >= min(2, num_samples)
    assert parts == 1 or 2 * ghost / 3 - 1 <= smallest
    assert largest <= 1.5 * ghost + 1


@given(
    samples=st.lists(st.integers(0, 20), min_size=1, max_size=12).filter(lambda s: sum(s) > 0),
    ghost=st.integers(2, 64),
)
def test_ranks_are_cut_into_runs(samples: list[int], ghost: int) -> None:
    """Every rank in one part, in order, each part with at least two samples where there are two."""
    parts = parts_of_ranks(samples, ghost)
    assert [rank for part in parts for rank in range(part.start, part.stop)] == list(
        range(len(samples))
    )
    assert all(sum(samples[part]) >= min(2, sum(samples)) for part in parts)


def test_even_ranks_are_cut_evenly() -> None:
    assert parts_of_ranks([16] * 8, 64) == [slice(0, 4), slice(4, 8)]
    assert parts_of_ranks([16] * 8, 32) == [slice(0, 2), slice(2, 4), slice(4, 6), slice(6, 8)]
    assert parts_of_ranks([16] * 8, 1000) == [slice(0, 8)]
    assert parts_of_ranks([16, 16, 16, 15], 32) == [slice(0, 2), slice(2, 4)]


ACROSS = {1: [[8]], 2: [[4, 4], [5, 0], [1, 3]], 3: [[4, 4, 4], [2, 2, 8], [0, 6, 1]]}


@pytest.mark.parametrize("size", ACROSS)
def test_across_workers(ranks: Ranks, size: int) -> None:
    """Ghost batches of several ranks, against one process that normalizes the same samples
    together."""
    ranks(size, normalize_across, timeout=50)


def normalize_across() -> None:
    with running() as (rank, size):
        for sizes in ACROSS[size]:
            for ghost in (4, 8):
                for options in OPTIONS:
                    across(sizes, ghost, rank, size, options)


def across(sizes: list[int], ghost: int, rank: int, size: int, options: dict[str, Any]) -> None:
    ours = GhostBatchNorm(3, ghost, across_workers=True, **options).double()
    theirs = nn.BatchNorm2d(3, **options).double()
    parts = (
        [sum(sizes[part]) for part in parts_of_ranks(sizes, ghost)]
        if size > 1
        else [ghost] * (8 // ghost)
    )
    mine = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    for step in range(2):
        compare(ours, theirs, batch(sum(sizes), seed=step), parts, mine)
    check_weights(ours, theirs)


def test_a_worker_without_samples() -> None:
    for options in OPTIONS:
        layer = GhostBatchNorm(3, 4, **options)
        before = {name: value.clone() for name, value in layer.state_dict().items()}
        data = torch.zeros(0, 3, 2, requires_grad=True)
        layer(data).sum().backward()
        assert all(param.grad is not None and not param.grad.any() for param in layer.parameters())
        assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())


def test_memory_format_and_words() -> None:
    layer = GhostBatchNorm(3, 2)
    assert layer(torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last)).is_contiguous(
        memory_format=torch.channels_last
    )
    assert "ghost=2" in repr(layer) and "across_workers=True" not in repr(layer)


def test_what_is_refused() -> None:
    for ghost in (1, 0, -4):
        with pytest.raises(ConfigError, match=f"ghost={ghost}: a ghost batch needs at least 2"):
            GhostBatchNorm(3, ghost)
    layer = GhostBatchNorm(3, 4)
    with pytest.raises(
        ConfigError,
        match=r"more than 1 value per channel in training, got 1 here \(input \[1, 3\]\)",
    ):
        layer(torch.zeros(1, 3))
    for shape in [(3,), (4, 2), (2, 4, 3)]:
        with pytest.raises(ConfigError, match=r"GhostBatchNorm\(3\) needs \(N, 3, ...\)"):
            layer(torch.zeros(shape))
    assert int(layer.num_batches_tracked) == 0


def test_a_first_batch_that_the_size_does_not_divide() -> None:
    layer = GhostBatchNorm(3, 32)
    for _ in range(2):  # it stays an error
        with pytest.raises(
            ConfigError,
            match=r"32 does not divide the 100 samples .*take ghost=25 or 20, or another batch",
        ):
            layer(torch.randn(100, 3))
    with pytest.raises(ConfigError, match=r"53 samples .*take ghost=53,"):
        layer(torch.randn(53, 3))
    assert int(layer.num_batches_tracked) == 0
    layer.eval()(torch.randn(100, 3))
    layer.train()(torch.randn(96, 3))
    layer(torch.randn(100, 3))  # a later one may be of any size
    assert int(layer.num_batches_tracked) == 3 + 3


def test_a_worker_with_less_than_a_ghost_batch_is_told() -> None:
    layer = GhostBatchNorm(3, 32)
    with pytest.warns(UserWarning, match=r"ghost=32.*has 8 samples.*across_workers=True"):
        layer(torch.randn(8, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer(torch.randn(8, 3))  # once is enough
        large = GhostBatchNorm(3, 32)
        large(torch.randn(32, 3))
        large(torch.randn(8, 3))  # the last batch of an epoch


def net() -> nn.Module:
    shared = nn.BatchNorm1d(4, eps=0.1, momentum=None)
    return nn.Sequential(
        nn.Linear(3, 4),
        shared,
        nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False)),
        shared,
    )


@pytest.mark.parametrize("options", [{"ghost": 8}, {"sync": True}], ids=str)
def test_convert(options: dict[str, Any]) -> None:
    """All of them, the shared one stays shared, and all that they hold stays; one batch of 8 gives
    the same as before."""
    model, reference = net().eval(), net()
    reference.load_state_dict(model.state_dict())
    before, calls = dict(model.named_parameters()), []
    model[1].register_forward_hook(lambda *_: calls.append(1))
    assert convert(model, **options) is model
    kind = GhostBatchNorm if "ghost" in options else SyncBatchNorm
    assert [type(model[index]) for index in (1, 3)] == [kind, kind] and type(model[2][1]) is kind
    assert model[1] is model[3]
    assert (model[1].eps, model[1].momentum, model[2][1].affine) == (0.1, None, False)
    assert not model[1].training
    assert all(param is before[name] for name, param in model.named_parameters())
    data = torch.randn(8, 3)
    assert torch.equal(model.train()(data), reference.train()(data))
    assert len(calls) == 2
    torch.testing.assert_close(dict(model.state_dict()), dict(reference.state_dict()))


def test_convert_again_and_alone() -> None:
    layer = convert(nn.BatchNorm2d(3), ghost=16, across_workers=True)
    assert isinstance(layer, GhostBatchNorm) and layer.across_workers
    other = convert(layer, ghost=8)
    assert isinstance(other, GhostBatchNorm) and (other.ghost, other.across_workers) == (8, False)
    assert isinstance(convert(nn.SyncBatchNorm(3), sync=True), SyncBatchNorm)


def test_what_convert_refuses() -> None:
    for options in ({}, {"ghost": 8, "sync": True}):
        with pytest.raises(ConfigError, match="either ghost=<samples> or sync=True"):
            convert(net(), **options)
    with pytest.raises(ConfigError, match="at least 2 samples"):
        convert(net(), ghost=1)
    with pytest.raises(ConfigError, match="across_workers belongs to ghost"):
        convert(net(), sync=True, across_workers=True)
    with pytest.raises(ConfigError, match="Linear has no batch norm"):
        convert(nn.Linear(2, 2), ghost=8)
    with pytest.raises(ConfigError, match="send a batch through the model first"):
        convert(nn.LazyBatchNorm1d(), ghost=8)
