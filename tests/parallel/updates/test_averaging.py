"""Averaging of weights: against a serial model of the parties, and what a checkpoint must hold."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from allstep.parallel.exchange import Named, Rule
from allstep.parallel.replicas import Replicas
from allstep.parallel.replicated import ReplicatedOptimizer, replicate
from allstep.parallel.updates import Averaging, OuterStep, Update
from support.default_group import joined
from support.local_steps import serial_model
from support.ranks import Ranks

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda params: torch.optim.SGD(params, 0.05, momentum=0.9, weight_decay=0.01),
    "adamw": lambda params: torch.optim.AdamW(params, 0.01),
}
OUTER = {
    "local": OuterStep(),
    "diloco": OuterStep(0.7, 0.5),
}
EVERY, STEPS = 3, 9


def network(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 1), nn.Linear(1, 1))
    net[3].requires_grad_(False)
    return net.to(dtype)


def shares(size: int, dtype: torch.dtype, steps: int = STEPS) -> list[list[tuple[Tensor, Tensor]]]:
    """Uneven ones; at some steps a party has no samples."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for step in range(steps):
        counts = [(step + 2 * party) % 5 for party in range(size)]
        data = [torch.randn(n, 6, dtype=dtype, generator=generator) for n in counts]
        found.append([(each, each.sum(1, keepdim=True).sin()) for each in data])
    return found


def made(net: nn.Module, name: str, update: Update, size: int, key: str = "t") -> Any:
    named = [Named(n, p) for n, p in net.named_parameters() if p.requires_grad]
    group = dist.distributed_c10d._get_default_group
    replicas = Replicas(named, group, lambda: key, Rule())  # type: ignore[arg-type, return-value]
    inner = OPTIMIZERS[name]([each.parameter for each in named])
    return replicate(inner, replicas, size, update)


def one_step(net: nn.Module, optimizer: ReplicatedOptimizer, data: Tensor, target: Tensor) -> None:
    optimizer.zero_grad()
    optimizer.weight = len(data)
    nn.functional.mse_loss(net(data), target).backward()
    optimizer.step()


def agree_with_the_serial_model(dtype: torch.dtype) -> list[list[Tensor]]:
    found = []
    with joined() as (rank, size):
        for name, make in OPTIMIZERS.items():
            for mode, outer in OUTER.items():
                net = network(dtype)
                update = Averaging(EVERY, outer)
                optimizer = made(net, name, update, size, f"{name}/{mode}")
                for step in shares(size, dtype):
                    one_step(net, optimizer, *step[rank])
                expected = serial_model(
                    [network(dtype) for _ in range(size)],
                    lambda ps, make=make: make([p for p in ps if p.requires_grad]),
                    shares(size, dtype),
                    EVERY,
                    lambda ps, o=outer: torch.optim.SGD(
                        [p for p in ps if p.requires_grad],
                        o.lr,
                        o.momentum,
                        nesterov=o.momentum > 0,
                    ),
                )
                tolerance = 1e-12 if dtype == torch.float64 else 2e-5
                for ours, theirs in zip(net.parameters(), expected, strict=True):
                    torch.testing.assert_close(
                        ours.detach(), theirs, rtol=tolerance, atol=tolerance, msg=f"{name} {mode}"
                    )
                found.append([p.detach().clone() for p in net.parameters()])
                optimizer.close()
    return found


@pytest.mark.parametrize(("hosts", "dtype"), [("aaa", torch.float64), ("ab", torch.float32)])
def test_local_and_diloco_are_the_serial_model(
    ranks: Ranks, hosts: str, dtype: torch.dtype
) -> None:
    first, *others = ranks(len(hosts), agree_with_the_serial_model, dtype, hosts=list(hosts))
    for other in others:
        for ours, theirs in zip(first, other, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
