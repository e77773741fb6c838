"""Averaging of weights: against a serial model of the parties, and what a checkpoint must hold."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from allstep.parallel.exchange import Named, Rule
from allstep.parallel.replicas import Replicas
from allstep.parallel.replicated import ReplicatedOptimizer, replicate
from allstep.parallel.updates import Averaging, EveryRank, OuterStep, Update
from allstep.parallel.updates.party_states import taken
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


def made(
    net: nn.Module,
    name: str,
    update: Update,
    size: int,
    key: str = "t",
    overlap: bool | None = None,
) -> Any:
    named = [Named(n, p) for n, p in net.named_parameters() if p.requires_grad]
    group = dist.distributed_c10d._get_default_group
    replicas = Replicas(named, group, lambda: key, Rule(), overlap=overlap)  # type: ignore[arg-type, return-value]
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


class OneSided(nn.Module):
    """Only rank 1 uses `second`; no rank uses `third`. The weights of `short` are bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(6, 1) for _ in range(3))
        self.short = nn.Linear(6, 1).bfloat16()

    def forward(self, data: Tensor, rank: int) -> Tensor:
        found: Tensor = self.first(data) + self.short(data.bfloat16()).float()
        return found + self.second(data) if rank == 1 else found


def unused_and_half(rank: int, size: int) -> None:
    """Parameters without gradient are averaged; what no rank changed keeps its bits."""
    torch.manual_seed(0)
    net = OneSided()
    before = copy.deepcopy(net)
    optimizer = made(net, "momentum", Averaging(2), size, "unused")
    for _ in range(2):
        optimizer.zero_grad()
        net(torch.ones(2, 6) * (rank + 1), rank).square().sum().backward()
        optimizer.step()
    assert torch.equal(net.third.weight, before.third.weight)
    assert not torch.equal(net.second.weight, before.second.weight)
    for parameter in net.parameters():
        everywhere = [torch.empty_like(parameter) for _ in range(size)]
        dist.all_gather(everywhere, parameter.detach())
        assert all(torch.equal(everywhere[0], each) for each in everywhere)
    optimizer.close()


def each_step_is_allreduce(rank: int, size: int) -> None:
    """With SGD, which is linear, the mean after each step is the step on the mean gradient."""
    ends = []
    for number, update in enumerate((Averaging(1), EveryRank(), Averaging(1, is_on=False))):
        net = network()
        optimizer = made(net, "momentum", update, size, f"each step {number}")
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(10 * step + rank)
            data = torch.randn(4, 6, dtype=torch.float64, generator=generator)
            one_step(net, optimizer, data, data.sum(1, keepdim=True).sin())
        ends.append([p.detach().clone() for p in net.parameters()])
        optimizer.close()
    averaged, reduced, off = ends
    for ours, theirs in zip(averaged, reduced, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    assert all(torch.equal(a, b) for a, b in zip(off, reduced, strict=True))


def states_of_all(rank: int, size: int) -> None:
    """Each rank gets its own state back; another number of ranks gets the mean of all."""
    net = network()
    optimizer = made(net, "adamw", Averaging(EVERY), size, "states")
    for step in shares(size, torch.float64, EVERY):
        one_step(net, optimizer, *step[rank])
    optimizer.gather_state()
    inner = [dict(optimizer.state[p]) for p in net.parameters() if p.requires_grad]
    saved = [optimizer.state_dict()["state"][number] for number in range(len(inner))]
    box: list[Any] = [saved]
    dist.broadcast_object_list(box, 0)
    means = [[torch.empty_like(each["exp_avg"]) for _ in range(size)] for each in inner]
    for mean, each in zip(means, inner, strict=True):
        dist.all_gather(mean, each["exp_avg"])
    parameters = [p for p in net.parameters() if p.requires_grad]
    for p, entries, own, mean in zip(parameters, box[0], inner, means, strict=True):
        mine = taken(entries, p, rank, size, size)
        assert mine.keys() == own.keys()
        assert all(torch.equal(mine[key], own[key]) for key in own), own.keys()
        other = taken(entries, p, 0, size + 1, size)
        torch.testing.assert_close(other["exp_avg"], torch.stack(mean).mean(0))
    optimizer.close()


def gradients_first(rank: int, size: int) -> None:
    """After the switch no gradient is reduced any more, not even one of a hook."""
    net = network()
    update = Averaging(EVERY, is_on=False)
    optimizer = made(net, "momentum", update, size, "first", overlap=True)
    steps = shares(size, torch.float64)
    for step in steps[:2]:
        one_step(net, optimizer, *step[rank])
    update.switch(optimizer, True)
    common = [p.detach().clone() for p in net.parameters()]
    one_step(net, optimizer, *steps[2][rank])
    for p, before in zip(net.parameters(), common, strict=True):
        everywhere = [torch.empty_like(p) for _ in range(size)]
        dist.all_gather(everywhere, p.detach())
        moved = p.requires_grad and any(not torch.equal(each, before) for each in everywhere)
        assert moved == any(not torch.equal(everywhere[0], each) for each in everywhere)
    optimizer.close()


def undone_round(rank: int, size: int) -> None:
    """A round that is undone and repeated has the bits of one that was not."""
    ends = []
    for undone in (False, True):
        net = network()
        update = Averaging(EVERY, OUTER["diloco"], keeps_undo=True)
        optimizer = made(net, "adamw", update, size, f"undone {undone}")
        steps = shares(size, torch.float64)
        for step in steps[:EVERY]:
            one_step(net, optimizer, *step[rank])
        if undone:
            for step in steps[EVERY + 1 : 2 * EVERY]:
                one_step(net, optimizer, *step[rank])
            update.undo(optimizer)
        for step in steps[EVERY:]:
            one_step(net, optimizer, *step[rank])
        ends.append([p.detach().clone() for p in net.parameters()])
        optimizer.close()
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def bytes_of_diloco(rank: int, size: int) -> None:
    """Of 32 steps with gradients, and of 32 steps with one average."""
    counts = {}
    group: Any = dist.distributed_c10d._get_default_group()
    for name, update in (("diloco", Averaging(32, OUTER["diloco"])), ("allreduce", EveryRank())):
        net = nn.Linear(300, 300)
        optimizer = made(net, "adamw", update, size, f"bytes {name}")
        data = torch.randn(4, 300)
        one_step(net, optimizer, data, data)  # agrees on the order of the parameters
        with counted(group) as counts[name]:
            for _ in range(32):
                one_step(net, optimizer, data, data)
        optimizer.close()
    assert 0 < sum(counts["diloco"]) <= sum(counts["allreduce"]) / 30


@contextmanager
def counted(group: Any) -> Iterator[list[int]]:
    """Collect the bytes of each reduction of a group."""
    found: list[int] = []
    reduce, scaled = group.allreduce, group.sum_scaled

    def allreduce(tensors: list[Tensor], *args: Any, **options: Any) -> Any:
        found.append(tensors[0].nbytes)
        return reduce(tensors, *args, **options)

    def sum_scaled(tensor: Tensor, scale: float) -> None:
        found.append(tensor.nbytes)
        scaled(tensor, scale)

    group.allreduce, group.sum_scaled = allreduce, sum_scaled
    try:
        yield found
    finally:
        del group.allreduce, group.sum_scaled


CHECKS = (
    unused_and_half,
    each_step_is_allreduce,
    states_of_all,
    gradients_first,
    undone_round,
    bytes_of_diloco,
)


def run_all() -> None:
    with joined() as (rank, size):
        for check in CHECKS:
            check(rank, size)


def test_what_an_average_holds(ranks: Ranks) -> None:
    ranks(3, run_all)
