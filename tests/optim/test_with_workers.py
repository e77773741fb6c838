"""The layer-wise optimizers on 1 to 3 ranks against one process with the whole batch, in float64,
with private and with shared weights."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from allstep.optim import LAMB, LARC, LARS, NovoGrad, groups
from support.hvd_ranks import running
from support.ranks import Ranks

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "lars": lambda params: LARS(
        params, 0.05, weight_decay=0.01, nesterov=True, trust_coefficient=0.1
    ),
    "larc": lambda params: LARC(params, 0.1, weight_decay=0.01),
    "lamb": lambda params: LAMB(params, 0.02, weight_decay=0.01),
    "novograd": lambda params: NovoGrad(params, 0.02, weight_decay=0.01),
}
DATA = torch.randn(6, 11, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def model() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)),
        nn.Conv2d(1, 4, 2),
        nn.Flatten(),
        nn.Linear(8, 20),
        nn.Tanh(),
        nn.Linear(20, 1),
    )
    net[1].to(memory_format=torch.channels_last)
    return net.double()


def step(net: nn.Module, optimizer: Any, data: Tensor) -> None:
    optimizer.zero_grad()
    (net(data) - data.sum(1, keepdim=True).sin()).square().mean().backward()
    optimizer.step()


def alone(name: str) -> tuple[list[Tensor], dict[str | int, float]]:
    net = model()
    optimizer = OPTIMIZERS[name](groups(net))
    for data in DATA:
        step(net, optimizer, data)
    return [param.detach() for param in net.parameters()], optimizer.trust_ratios()  # type: ignore[attr-defined]


def together(hvd: Any, name: str, share_weights: bool) -> None:
    """Half of the steps, the states into a fresh net and optimizer (by way of rank 0), the other
    half."""
    state, weights = None, {}
    for half in DATA.split(3):
        net = model()
        if state is not None:
            net.load_state_dict(weights)
        wrapped = OPTIMIZERS[name](groups(net))
        if state is not None and hvd.rank() == 0:
            wrapped.load_state_dict(state)
        optimizer = hvd.DistributedOptimizer(
            wrapped, net.named_parameters(), share_weights=share_weights
        )
        if state is not None:
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        for data in half:
            mine = data[hvd.rank() :: hvd.size()]
            optimizer.weight = len(mine)
            step(net, optimizer, mine)
        state = optimizer.state_dict()
        weights = {key: value.clone() for key, value in net.state_dict().items()}
        hvd.barrier()
    expected, ratios = alone(name)
    for param, weight in zip(net.parameters(), expected, strict=True):
        torch.testing.assert_close(param.detach(), weight, rtol=0, atol=1e-10)
    check_ratios(hvd, optimizer.trust_ratios(), ratios, share_weights)


def check_ratios(
    hvd: Any, found: dict[str | int, float], expected: dict[str | int, float], share_weights: bool
) -> None:
    """With shared weights the owners of layers know their ratios, together all of them."""
    if share_weights:
        parts = hvd.allgather_object(found)
        assert sum(map(len, parts)) == len(expected)
        found = {name: ratio for part in parts for name, ratio in part.items()}
    assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_as_one_worker(ranks: Ranks, num_ranks: int) -> None:
    def work() -> None:
        import allstep.torch as hvd

        with running():
            for name in OPTIMIZERS:
                for share_weights in (False, True):
                    together(hvd, name, share_weights)

    ranks(num_ranks, work, timeout=150)
