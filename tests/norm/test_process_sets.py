"""Norms over a process set of hvd, on 3 ranks, against torch's BatchNorm in one process with the
samples of the members, in float64."""

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import allstep.torch as hvd
from allstep.errors import ConfigError
from allstep.norm import GhostBatchNorm, SyncBatchNorm, convert
from support.default_group import joined
from support.hvd_ranks import running
from support.ranks import Ranks

SIZES = [3, 4, 5]


def batch(step: int) -> Tensor:
    draws = torch.Generator().manual_seed(step)
    return torch.randn(sum(SIZES), 3, 2, generator=draws, dtype=torch.float64) * 3 + 7


def check(model: nn.Module, chosen: hvd.ProcessSet, rank: int) -> None:
    """Outputs, gradients of input and weights, running statistics; three steps."""
    reference = nn.BatchNorm1d(3).double()
    for step in range(3):
        parts = batch(step).split(SIZES)
        weights = batch(step + 10).sin().split(SIZES)
        mine = parts[rank].clone().requires_grad_()
        theirs = {member: parts[member].clone().requires_grad_() for member in chosen.ranks}
        together = reference(torch.cat(list(theirs.values())))
        expected = together.split([SIZES[member] for member in chosen.ranks])[chosen.rank()]
        output = model(mine)
        (output * weights[rank]).sum().backward()
        (together * torch.cat([weights[member] for member in chosen.ranks])).sum().backward()
        torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(mine.grad, theirs[rank].grad, rtol=1e-10, atol=1e-10)
    for (name, param), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        total = hvd.allreduce(param.grad, op=hvd.Sum, process_set=chosen, name=name)
        torch.testing.assert_close(total, other.grad, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(
        dict(model.state_dict()), dict(reference.state_dict()), rtol=1e-12, atol=1e-12
    )


def norms(chosen: Any) -> list[nn.Module]:
    return [
        SyncBatchNorm(3, process_group=chosen).double(),
        GhostBatchNorm(3, 64, across_workers=True, process_group=chosen).double(),
        convert(nn.BatchNorm1d(3).double(), sync=True, process_group=chosen),
        convert(nn.BatchNorm1d(3).double(), ghost=64, across_workers=True, process_group=chosen),
    ]


def test_statistics_and_gradients_of_some_ranks(ranks: Ranks) -> None:
    """Ranks 0 and 2 together, rank 1 beside them alone; then all, by name; and after a restart with
    other numbers."""
    ranks(3, normalize_in_sets)


def normalize_in_sets() -> None:
    warnings.simplefilter("ignore")  # rank 1 alone has less than a ghost batch
    pair, single = hvd.ProcessSet([2, 0]), hvd.ProcessSet([1])
    layers: list[nn.Module] = []
    for sets in ([pair, single], [single, pair]):
        with running(process_sets=sets) as (rank, _):
            mine = single if rank == 1 else pair
            for model in norms(mine):
                check(model, mine, rank)
            check(
                SyncBatchNorm(3, process_group=hvd.global_process_set).double(),
                hvd.global_process_set,
                rank,
            )
            layers.append(norms(mine)[0])
            for layer in layers:  # the first one is from before the restart
                layer(batch(0).split(SIZES)[rank])
            known = copy.deepcopy(layers[0])
    with pytest.raises(
        ConfigError, match=r"process set of a norm, with ranks \[.*hvd.init\(process_sets="
    ):
        layers[0](batch(0))
    other = [hvd.ProcessSet([0, 1]), hvd.ProcessSet([1, 2])]
    with running(process_sets=other), pytest.raises(ConfigError, match="not registered"):
        known(batch(0))  # its copy of the set still has a number, which is another set's now


def test_what_is_refused(ranks: Ranks) -> None:
    ranks(3, choose_wrongly)


def choose_wrongly() -> None:
    pair = hvd.ProcessSet([0, 2])
    with running(process_sets=[pair]) as (rank, _):
        if rank == 1:
            for layer in norms(pair):
                with pytest.raises(
                    ConfigError,
                    match=r"rank 1 .* process set 1, with ranks \[0, 2\], and is not in it",
                ):
                    layer(batch(0))
        for layer in norms(hvd.ProcessSet([0, 1])):
            with pytest.raises(ConfigError, match=r"with ranks \[0, 1\], is not registered"):
                layer(batch(0))
        for layer in norms([0, 2]):
            with pytest.raises(ConfigError, match=r"process_group=\[0, 2\] of a norm: give"):
                layer(batch(0))
        assert (
            norms(pair)[0].eval()(batch(0)).shape == batch(0).shape
        )  # alone in evaluation, whoever asks
    with joined() as (rank, _):
        group = dist.new_group([0, 2])
        if rank == 1:
            with pytest.raises(
                ConfigError, match=r"a torch\.distributed group that this rank is in"
            ):
                SyncBatchNorm(3, process_group=group).double()(batch(0))
