"""Gradients of the collectives, on 1, 2 and 3 ranks, as the contract has them."""

import torch
from torch import Tensor

import allstep.torch as hvd
from support.hvd_ranks import in_worlds, run_checks
from support.ranks import Ranks


def weights(rank: int, *shape: int) -> Tensor:
    """What each element counts for in rank's loss."""
    return torch.randn(
        shape, dtype=torch.float64, generator=torch.Generator().manual_seed(50 + rank)
    )


def gradient(output: Tensor, weight: Tensor, *inputs: Tensor) -> Tensor | list[Tensor]:
    grads = torch.autograd.grad((output * weight).sum(), inputs, retain_graph=True)
    return grads[0] if len(grads) == 1 else list(grads)


@in_worlds
def test_gradients(ranks: Ranks, hosts: list[str]) -> None:
    run_checks(ranks, hosts, through_reductions, through_moving)


def through_reductions(rank: int, size: int) -> None:
    close = torch.testing.assert_close
    x = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
    given = [weights(each, 2, 3) for each in range(size)]
    output = hvd.allreduce(x, op=hvd.Sum, prescale_factor=2.0, postscale_factor=3.0)
    close(gradient(output, given[rank], x), 6 * sum(given))
    close(gradient(output, given[rank], x), 6 * sum(given))  # the same graph a second time
    close(gradient(hvd.allreduce(x), given[rank], x), sum(given) / size)
    close(
        gradient(hvd.allreduce(x, op=hvd.Max), given[rank], x), torch.stack(given).amax(0)
    )  # the op again
    half = torch.ones(2, 3, requires_grad=True)
    compressed = hvd.allreduce(half, op=hvd.Sum, compression=hvd.Compression.fp16)
    assert compressed.dtype == torch.float32
    close(gradient(compressed, torch.ones(2, 3), half), torch.full((2, 3), float(size)))
    through_a_group(rank, size)
    through_scatter(rank, size)
    twice(size)


def through_a_group(rank: int, size: int) -> None:
    a, b = (torch.ones(shape, dtype=torch.float64, requires_grad=True) for shape in (2, 4))
    first, _second = hvd.grouped_allreduce([a, b], op=hvd.Sum)
    grads = torch.autograd.grad((first * weights(rank, 2)).sum(), [a, b])
    torch.testing.assert_close(grads[0], sum(weights(each, 2) for each in range(size)))
    torch.testing.assert_close(grads[1], torch.zeros(4, dtype=torch.float64))  # nobody used it


def through_scatter(rank: int, size: int) -> None:
    rows = 2 * size + 1
    x = torch.ones(rows, 2, dtype=torch.float64, requires_grad=True)
    whole = torch.cat([weights(each, 3 if each == 0 else 2, 2) for each in range(size)])
    mine = weights(rank, 3 if rank == 0 else 2, 2)
    for op, factor in [(hvd.Average, 1), (hvd.Sum, size)]:
        output = hvd.reducescatter(x, op=op, prescale_factor=2.0, postscale_factor=0.25)
        torch.testing.assert_close(gradient(output, mine, x), 0.5 * factor * whole)
        (grouped,) = hvd.grouped_reducescatter([x], op=op)
        torch.testing.assert_close(gradient(grouped, mine, x), factor * whole)
    incoming = torch.ones(mine.shape, dtype=torch.float64)
    hvd.reducescatter(x, op=hvd.Sum, postscale_factor=5.0).backward(incoming)
    assert incoming.unique().tolist() == [1]  # Horovod scales it in place


def twice(size: int) -> None:
    """The gradient of a gradient: d/dx of (size * x^2 summed) is there when the graph is kept."""
    x = torch.tensor([3.0], dtype=torch.float64, requires_grad=True)
    (first,) = torch.autograd.grad((hvd.allreduce(x * x, op=hvd.Sum)).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(
        (first, second), (6.0 * size * torch.ones_like(x), 2.0 * size * torch.ones_like(x))
    )


def through_moving(rank: int, size: int) -> None:
    close = torch.testing.assert_close
    rows = [each + 1 for each in range(size)]
    x = torch.ones(rows[rank], 2, dtype=torch.float64, requires_grad=True)
    averaged = sum(weights(each, sum(rows), 2) for each in range(size)) / size
    own = averaged[sum(rows[:rank]) : sum(rows[: rank + 1])]
    close(gradient(hvd.allgather(x), weights(rank, sum(rows), 2), x), own)
    y = torch.ones(1, dtype=torch.float64, requires_grad=True)
    gathered, _ = hvd.grouped_allgather([x, y])
    close(torch.autograd.grad((gathered * weights(rank, sum(rows), 2)).sum(), x)[0], own)

    z = torch.ones(3, dtype=torch.float64, requires_grad=True)
    root = size - 1
    expected = (
        sum(weights(each, 3) for each in range(size)) / size
        if rank == root
        else torch.zeros(3).double()
    )
    close(gradient(hvd.broadcast(z, root), weights(rank, 3), z), expected)

    splits = [
        each + 1 for each in range(size)
    ]  # rank r gets r + 1 rows of each; one row more stays
    t = torch.ones(sum(splits) + 1, dtype=torch.float64, requires_grad=True)
    output, received = hvd.alltoall(t, splits=splits)
    assert not received.requires_grad
    back = [
        weights(each, size * (each + 1))[rank * (each + 1) : (rank + 1) * (each + 1)]
        for each in range(size)
    ]
    close(
        gradient(output, weights(rank, output.shape[0]), t),
        torch.cat([*back, torch.zeros(1).double()]),
    )
