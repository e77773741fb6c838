"""A step in two parts, `reduce_gradients` and `apply`, with norms and clipping: N workers against plain torch in one process."""

from typing import Any

import pytest
import torch
from torch import nn

from allstep.errors import UserError
from hvd.running import running
from ranks import Ranks


def model() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 2), nn.Flatten(), nn.Linear(8, 40), nn.Tanh(), nn.Linear(40, 1)
    )
    net[1].to(memory_format=torch.channels_last)
    return net.double()


DATA = torch.randn(4, 11, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def backward(net: nn.Module, data: torch.Tensor) -> None:
    (net(data) - data.sum(1, keepdim=True).sin()).square().mean().backward()


def optimizer_of(net: nn.Module, share_weights: bool) -> Any:
    import allstep.torch as hvd

    plain = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    return hvd.DistributedOptimizer(plain, net.named_parameters(), share_weights=share_weights)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_one_without_the_other(ranks: Ranks, num_ranks: int) -> None:
    def check(share_weights: bool) -> None:
        net = model()
        optimizer = optimizer_of(net, share_weights)
        with pytest.raises(UserError, match=r"apply\(\): there are no reduced gradients"):
            optimizer.apply()
        backward(net, DATA[0])
        optimizer.reduce_gradients()
        for name in ("reduce_gradients", "step", "synchronize"):
            with pytest.raises(UserError, match=rf"{name}\(\) after optimizer.reduce_gradients\(\)"):
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

    def work() -> None:
        with running():
            for share_weights in (False, True):
                check(share_weights)

    ranks(num_ranks, work)
