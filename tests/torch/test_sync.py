"""`DistributedOptimizer(..., sync=)`: weights that are averaged at intervals, in a script."""

import copy
import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import allstep.torch as hvd
from allstep.parallel.sync_mode import SyncMode
from allstep.torch.mpi_ops import Average, Sum
from allstep.torch.sync_rules import averaging, requested_mode
from support.hvd_ranks import run_checks
from support.local_steps import serial_model
from support.ranks import Ranks

EVERY = 2


class Net(nn.Module):
    """With a frozen layer, a batch norm, and a mask that holds infinities."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.frozen, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 1)
        self.norm = nn.BatchNorm1d(8)
        self.frozen.requires_grad_(False)
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))

    def forward(self, data: Tensor) -> Tensor:
        hidden: Tensor = self.norm(self.frozen(self.first(data)).tanh())
        return self.last(hidden)  # type: ignore[no-any-return]


def network(kind: type[nn.Module] = Net) -> nn.Module:
    torch.manual_seed(3)
    return kind().double()


def plain() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def share(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    data = torch.randn(4, 6, dtype=torch.float64, generator=generator)
    return data, data.sum(1, keepdim=True).sin()


def momentum(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, 0.05, momentum=0.9)


def train(net: nn.Module, optimizer: Any, rank: int, steps: range) -> None:
    for step in steps:
        data, target = share(rank, step)
        optimizer.zero_grad()
        nn.functional.mse_loss(net(data), target).backward()
        optimizer.step()


def equal_everywhere(tensors: list[Tensor], name: str) -> bool:
    flat = torch.cat([each.detach().flatten() for each in tensors])
    everywhere = hvd.allgather(flat[None], name=name)
    return all(torch.equal(everywhere[0], each) for each in everywhere)


def is_the_serial_model(rank: int, size: int) -> None:
    for mode in ("local:2", "diloco:2"):
        net = plain()
        optimizer = hvd.DistributedOptimizer(
            momentum(net.parameters()), net.named_parameters(), sync=mode
        )
        train(net, optimizer, rank, range(6))
        outer = optimizer._replica_update.outer
        expected = serial_model(
            [plain() for _ in range(size)],
            momentum,
            [[share(party, step) for party in range(size)] for step in range(6)],
            EVERY,
            lambda ps, o=outer: torch.optim.SGD(ps, o.lr, o.momentum, nesterov=o.momentum > 0),
        )
        for ours, theirs in zip(net.parameters(), expected, strict=True):
            torch.testing.assert_close(ours.detach(), theirs, rtol=1e-12, atol=1e-12, msg=mode)


def buffers_and_frozen_layers(rank: int, size: int) -> None:
    """Statistics become equal; what no rank changes keeps its bits, infinities included."""
    net = network()
    frozen = [copy.deepcopy(each) for each in (net.frozen.weight, net.mask)]
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    parameters = [p for p in net.parameters() if p.requires_grad]
    optimizer = hvd.DistributedOptimizer(
        momentum(parameters), net.named_parameters(), sync="local:3"
    )
    train(net, optimizer, rank, range(2))
    floats = [each for each in net.state_dict().values() if each.is_floating_point()]
    assert size == 1 or not equal_everywhere(floats[:2], "before")
    statistics = [net.norm.running_mean.clone()]
    mean = hvd.allreduce(statistics[0], name="statistics")
    optimizer.synchronize_weights()
    assert equal_everywhere([each for each in floats if each is not net.mask], "after")
    torch.testing.assert_close(net.norm.running_mean, mean, rtol=1e-12, atol=1e-12)
    assert torch.equal(net.frozen.weight, frozen[0])
    assert torch.equal(net.mask, frozen[1])


def saved_and_resumed(rank: int, size: int) -> None:
    """With `gather_state` a resumed training has the bits of one that was not interrupted."""
    ends = []
    for interrupted in (False, True):
        net = plain()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.AdamW(net.parameters(), 0.01), net.named_parameters(), sync="diloco:2"
        )
        train(net, optimizer, rank, range(4))
        if interrupted:
            optimizer.gather_state()
            weights = copy.deepcopy(net.state_dict()) if rank == 0 else None
            state = copy.deepcopy(optimizer.state_dict()) if rank == 0 else None
            net = plain()
            for parameter in net.parameters():
                parameter.data.add_(rank + 1.0)
            optimizer = hvd.DistributedOptimizer(
                torch.optim.AdamW(net.parameters(), 0.5), net.named_parameters(), sync="diloco:2"
            )
            if rank == 0:
                net.load_state_dict(weights)
                optimizer.load_state_dict(state)
            hvd.broadcast_parameters(net.state_dict(), root_rank=0)
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        train(net, optimizer, rank, range(4, 8))
        ends.append([p.detach().clone() for p in net.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def elastic_state(rank: int, size: int) -> None:
    """A commit keeps the outer momentum; after a restore the training repeats the same bits."""
    net = plain()
    optimizer = hvd.DistributedOptimizer(
        momentum(net.parameters()), net.named_parameters(), sync="diloco:2"
    )
    state = hvd.elastic.TorchState(net, optimizer)
    train(net, optimizer, rank, range(4))
    state.save()
    ends = []
    for _ in range(2):
        train(net, optimizer, rank, range(4, 8))
        ends.append([p.detach().clone() for p in net.parameters()])
        state.restore()
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def one_rank_has_fewer_steps(rank: int, size: int) -> None:
    """A rank that has joined takes part in averages, with what it did before."""
    net = plain()
    optimizer = hvd.DistributedOptimizer(
        momentum(net.parameters()), net.named_parameters(), sync="local:2"
    )
    train(net, optimizer, rank, range(3 if rank == 0 else 6))
    hvd.join()
    assert equal_everywhere(list(net.parameters()), "joined")


def by_variable(rank: int, size: int) -> None:
    net = plain()
    os.environ["ALLSTEP_SYNC"] = "local:2"
    try:
        optimizer = hvd.DistributedOptimizer(momentum(net.parameters()), net.named_parameters())
    finally:
        del os.environ["ALLSTEP_SYNC"]
    train(net, optimizer, rank, range(1))
    assert not equal_everywhere(list(net.parameters()), "one step")
    train(net, optimizer, rank, range(1, 2))
    assert equal_everywhere(list(net.parameters()), "two steps")


CHECKS = (
    is_the_serial_model,
    buffers_and_frozen_layers,
    saved_and_resumed,
    elastic_state,
    one_rank_has_fewer_steps,
    by_variable,
)


@pytest.mark.parametrize("hosts", [["a"] * 3, ["a", "b"]], ids=["3", "2 on two hosts"])
def test_weights_are_averaged_at_intervals(ranks: Ranks, hosts: list[str]) -> None:
    run_checks(ranks, hosts, *CHECKS)


@pytest.mark.parametrize(
    ("sync", "found"),
    [
        ("async", "sync=async: not available in DistributedOptimizer yet; available: allreduce"),
        ("stale:2", "not available in DistributedOptimizer yet"),
        (
            "elastic:8",
            "claim samples, which a script does not; use local:8 here, or `allstep train",
        ),
        ("local:8:2", "does not know the epochs of its script; use local:8"),
        ("locale:8", "did you mean 'local'"),
    ],
)
def test_modes_that_a_script_cannot_have(
    monkeypatch: pytest.MonkeyPatch, sync: str, found: str
) -> None:
    with pytest.raises(ValueError, match=found) as error:
        requested_mode(sync)
    assert "\n" not in str(error.value)
    monkeypatch.setenv("ALLSTEP_SYNC", sync)
    with pytest.raises(ValueError, match=found.replace("sync=", "ALLSTEP_SYNC=")):
        requested_mode(None)


@pytest.mark.parametrize(
    ("make", "op", "share_weights", "found"),
    [
        (momentum, Sum, False, "needs op=hvd.Average"),
        (momentum, Average, True, "exclude each other"),
        (torch.optim.LBFGS, Average, False, "does not work with LBFGS"),
    ],
)
def test_options_that_do_not_fit(make: Any, op: int, share_weights: bool, found: str) -> None:
    net, mode = plain(), SyncMode("local", 8)
    with pytest.raises(ValueError, match=found):
        averaging(make(net.parameters()), mode, op, share_weights, net.named_parameters())
