"""SyncBatchNorm against torch's BatchNorm in one process with the whole batch: outputs, all
gradients, running statistics."""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import allstep.torch as hvd
from allstep.comm.group.process_group import AllstepGroup
from allstep.errors import ConfigError
from allstep.norm import SyncBatchNorm
from support.default_group import joined
from support.hvd_ranks import running
from support.ranks import Ranks

BATCHES = {1: [[4]], 2: [[3, 5], [0, 4], [6, 0]], 3: [[2, 2, 2], [1, 0, 7], [0, 0, 2]]}
SHAPES: dict[tuple[int, ...], type[nn.Module]] = {
    (): nn.BatchNorm1d,
    (5,): nn.BatchNorm1d,
    (3, 2): nn.BatchNorm2d,
    (2, 3, 2): nn.BatchNorm3d,
}


def whole_batch(shape: tuple[int, ...], count: int, channels: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(count)
    return torch.randn(count, channels, *shape, generator=generator, dtype=torch.float64) * 3 + 7


def share(batch: Tensor, sizes: list[int], rank: int) -> Tensor:
    return batch.split(sizes)[rank].clone()


def against_one(sizes: list[int], rank: int, shape: tuple[int, ...], **options: Any) -> None:
    """Three steps of both; the weights move, so that they are not just ones and zeros."""
    ours = SyncBatchNorm(3, **options).double()
    reference = SHAPES[shape](3, **options).double()
    for number in range(3):
        batch = whole_batch(shape, sum(sizes)) + number
        weights = torch.linspace(-1, 2, batch.numel(), dtype=torch.float64).view(batch.shape).sin()
        mine, theirs = share(batch, sizes, rank).requires_grad_(), batch.clone().requires_grad_()
        output, expected = ours(mine), reference(theirs)
        (output * share(weights, sizes, rank)).sum().backward()
        (expected * weights).sum().backward()
        torch.testing.assert_close(output, share(expected, sizes, rank), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(
            mine.grad, share(theirs.grad, sizes, rank), rtol=1e-10, atol=1e-10
        )
        move_alike(ours, reference)
    torch.testing.assert_close(
        dict(ours.state_dict()), dict(reference.state_dict()), rtol=1e-12, atol=1e-12
    )
    ours.eval(), reference.eval()
    torch.testing.assert_close(ours(mine), reference(mine), rtol=1e-12, atol=1e-12)


def move_alike(ours: nn.Module, reference: nn.Module) -> None:
    """One step down each gradient: ours summed over the ranks, as an optimizer would."""
    for mine, theirs in zip(ours.parameters(), reference.parameters(), strict=True):
        total = hvd.allreduce(mine.grad, op=hvd.Sum)
        torch.testing.assert_close(total, theirs.grad, rtol=1e-10, atol=1e-10)
        with torch.no_grad():
            mine -= 0.1 * total
            theirs -= 0.1 * theirs.grad
        mine.grad = theirs.grad = None


@pytest.mark.parametrize("size", BATCHES)
def test_as_one_process_with_the_whole_batch(ranks: Ranks, size: int) -> None:
    ranks(size, normalize_all)


def normalize_all() -> None:
    with running() as (rank, size):
        for sizes in BATCHES[size]:
            for shape in SHAPES:
                against_one(sizes, rank, shape)
            against_one(sizes, rank, (3, 2), momentum=None)
            against_one(sizes, rank, (3, 2), affine=False, eps=0.1)
            against_one(sizes, rank, (3, 2), track_running_stats=False)


def test_running_statistics_are_the_same_bits(ranks: Ranks) -> None:
    states = ranks(3, train_and_tell, hosts=["a", "b", "a"])
    assert states[0] == states[1] == states[2]


def train_and_tell() -> list[list[float]]:
    with running() as (rank, _):
        layer = SyncBatchNorm(4)
        for _ in range(5):
            layer(torch.randn(rank, 4, 3))  # rank 0 has nothing
        return [layer.running_mean.tolist(), layer.running_var.tolist()]


def test_far_from_zero_and_in_few_bits(ranks: Ranks) -> None:
    """A sum of squares would lose the variance of 1 beside a mean of 10,000 in float32."""
    ranks(2, normalize_far_away)


def normalize_far_away() -> None:
    with running() as (rank, _):
        batch = torch.randn(64, 2, 8, generator=torch.Generator().manual_seed(0))
        far = (batch + 1e4).requires_grad_()
        mine = share(far.detach(), [40, 24], rank).requires_grad_()
        layer = SyncBatchNorm(2)
        exact = nn.BatchNorm1d(2).double()(far.detach().double())
        torch.testing.assert_close(
            layer(mine).double(), share(exact, [40, 24], rank), rtol=0, atol=2e-3
        )
        torch.testing.assert_close(
            layer.running_var.double(), 0.9 + 0.1 * far.double().var((0, 2)), rtol=1e-4, atol=0
        )
        for dtype in (torch.bfloat16, torch.float16):
            for params in (torch.float32, dtype):
                half = share(batch, [40, 24], rank).to(dtype).requires_grad_()
                output = SyncBatchNorm(2).to(params)(half)
                output.square().mean().backward()
                assert output.dtype == half.grad.dtype == dtype
                expected = share(nn.BatchNorm1d(2)(batch.to(dtype).float()), [40, 24], rank)
                torch.testing.assert_close(output.float(), expected, rtol=0.02, atol=0.02)


def test_memory_format(ranks: Ranks) -> None:
    ranks(2, keep_channels_last)


def keep_channels_last() -> None:
    with running() as (rank, _):
        batch = whole_batch((4, 5), 6).contiguous(memory_format=torch.channels_last)
        mine = batch.split([2, 4])[rank].clone(memory_format=torch.preserve_format).requires_grad_()
        output = SyncBatchNorm(3).double()(mine)
        output.square().sum().backward()
        for each in (output, mine.grad):
            assert each.is_contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(output, share(nn.BatchNorm2d(3).double()(batch), [2, 4], rank))


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """How often each collective of a group of ours is called."""
    calls: Counter[str] = Counter()
    before = {
        name: vars(AllstepGroup)[name]
        for name in ("allreduce", "allgather", "broadcast", "all_gather_single")
    }

    def wrapped(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return before[name](*args, **kwargs)

        return call

    for name in before:
        setattr(AllstepGroup, name, wrapped(name))
    yield calls
    for name, method in before.items():
        setattr(AllstepGroup, name, method)


def test_one_collective_each_way(ranks: Ranks) -> None:
    ranks(2, count_collectives)


def count_collectives() -> None:
    with running(), counted() as calls:
        layer = SyncBatchNorm(3)
        layer(torch.randn(2, 3))  # makes the group
        calls.clear()
        data = torch.randn(4, 3, requires_grad=True)
        output = layer(data)
        assert calls == {"allgather": 1}
        output.sum().backward()
        assert calls == {"allgather": 1, "allreduce": 1}
        layer(torch.randn(4, 3)).sum().backward()  # nobody wants the gradient of this input
        assert calls == {"allgather": 2, "allreduce": 1}
        layer.eval()
        layer(data)
        assert calls == {"allgather": 2, "allreduce": 1}


@pytest.mark.parametrize("backend", ["allstep", "gloo"])
def test_under_ddp_without_hvd(ranks: Ranks, backend: str) -> None:
    ranks(2, train_with_ddp, backend)


def train_with_ddp(backend: str) -> None:
    """Train in a function of its own, so that DDP is freed before its process group.

    torch frees a group of Gloo that only DDP still holds without releasing the GIL, and waits for
    a thread of Gloo that may need it.
    """
    with joined(backend) as (rank, size):
        compare_ddp_with_one_process(rank, size)


def compare_ddp_with_one_process(rank: int, size: int) -> None:
    """DDP averages the gradients of ranks, which have 2 and 4 samples: the loss of each is weighted
    so that this is the global mean."""
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)).double()
    model = nn.Sequential(nn.Linear(3, 3), SyncBatchNorm(3), nn.Linear(3, 1)).double()
    model.load_state_dict(reference.state_dict())
    parallel = DistributedDataParallel(model)
    optimizers = [
        torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, reference)
    ]
    for number in range(4):
        batch = whole_batch((), 6) - number
        for optimizer in optimizers:
            optimizer.zero_grad()
        (parallel(share(batch, [2, 4], rank)).square().sum() * size / 6).backward()
        reference(batch).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(
        dict(model.state_dict()), dict(reference.state_dict()), rtol=1e-10, atol=1e-10
    )


def test_a_group_of_some(ranks: Ranks) -> None:
    ranks(3, normalize_in_pairs)


def normalize_in_pairs() -> None:
    with joined() as (rank, _):
        pair, single = dist.new_group([0, 2]), dist.new_group([1])
        layer = SyncBatchNorm(3, process_group=single if rank == 1 else pair).double()
        batch = whole_batch((), 6)
        mine = share(batch, [2, 2, 2], rank)
        others = mine if rank == 1 else torch.cat([batch[:2], batch[4:]])
        layer(mine)
        torch.testing.assert_close(layer.running_mean, 0.1 * others.mean(0))


def test_alone_it_is_torchs() -> None:
    layer, reference = SyncBatchNorm(3), nn.BatchNorm2d(3)
    batch = whole_batch((2, 2), 4).float()
    assert torch.equal(layer(batch), reference(batch))
    assert layer.state_dict().keys() == reference.state_dict().keys()
    assert torch.equal(layer.running_var, reference.running_var)


def test_alone_with_one_sample() -> None:
    """As with others: an error with the numbers and the next step, and nothing has changed.

    An empty batch is torch's.
    """
    layer = SyncBatchNorm(3)
    with pytest.raises(
        ConfigError,
        match=r"got 1 here \(input \[1, 3\]\): give each worker at least 2 samples.*GroupNorm",
    ):
        layer(torch.zeros(1, 3))
    assert int(layer.num_batches_tracked) == 0
    assert layer(torch.zeros(1, 3, 2)).shape == (1, 3, 2)  # two values
    assert layer(torch.zeros(0, 3)).shape == (0, 3)
    assert layer.eval()(torch.zeros(1, 3)).shape == (1, 3)


def test_again_after_a_restart(ranks: Ranks) -> None:
    """The group belongs to the engine that made it."""
    ranks(2, restart)


def restart() -> None:
    layer = SyncBatchNorm(2)
    for _ in range(3):
        with running() as (rank, _):
            layer(torch.randn(rank + 1, 2))


def test_the_first_batch_of_a_rank_may_be_late(ranks: Ranks) -> None:
    """Later than ranks may be at the start: reading data takes its time."""
    ranks(2, come_late, env={"ALLSTEP_START_TIMEOUT": "4"})


def come_late() -> None:
    with running() as (rank, _):
        time.sleep(5 * rank)
        layer = SyncBatchNorm(2)
        layer(torch.full((1, 2), float(rank)))
        assert layer.running_mean.tolist() == pytest.approx([0.05, 0.05])


def test_wrong_input(ranks: Ranks) -> None:
    ranks(2, give_wrong_input)


def give_wrong_input() -> None:
    with running() as (rank, _):
        layer = SyncBatchNorm(3)
        for shape in [(3,), (4, 2), (2, 4, 3)]:
            with pytest.raises(ConfigError, match=r"SyncBatchNorm\(3\) needs \(N, 3, ...\)"):
                layer(torch.zeros(shape))
        for count in (0, 1):
            words = (
                rf"more than 1 value per channel in training, got {count} over all ranks \(input"
                rf" \[{count * rank}, 3\]\): give"
            )
            with pytest.raises(ConfigError, match=words):
                layer(torch.zeros(count * rank, 3))
        assert int(layer.num_batches_tracked) == 0
        layer(torch.zeros(1, 3))  # two in all
