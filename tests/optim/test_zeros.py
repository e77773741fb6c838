"""Weights and gradients of zero, and eps=0: what is 0 / 0 in a formula is a step of nothing, never
NaN. By hand, from the formulas."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from allstep.optim import LAMB, LARC, LARS, NovoGrad
from allstep.optim.layerwise import LayerWise

EPS_ZERO: dict[str, Callable[[list[nn.Parameter]], LayerWise]] = {
    "lamb": lambda params: LAMB(params, lr=0.1, eps=0.0),
    "novograd": lambda params: NovoGrad(params, lr=0.1, eps=0.0),
}


def weight_of(
    value: float, gradient: float | Tensor, dtype: torch.dtype = torch.float64
) -> nn.Parameter:
    param = nn.Parameter(torch.full((2, 2), value, dtype=dtype))
    param.grad = torch.zeros_like(param) + gradient
    return param


@pytest.mark.parametrize("lr", [0.5, 2.0])
@pytest.mark.parametrize("make", [LARS, LARC])
def test_weights_of_zero_go_at_the_rate_given(make: type[LARS], lr: float) -> None:
    param = weight_of(0.0, 1.0)
    optimizer = make([param], lr=lr)
    optimizer.step()
    assert param.detach().unique().tolist() == [-lr]
    assert optimizer.trust_ratios() == {0: 1.0}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", EPS_ZERO)
def test_no_gradient_and_no_eps(name: str, dtype: torch.dtype) -> None:
    """A layer whose gradient is always zero stays, and one beside it, with some zeros in its
    gradient, learns."""
    some = torch.tensor([[1.0, 0.0], [0.5, 0.0]], dtype=dtype)
    dead, alive = weight_of(1.0, 0.0, dtype), weight_of(1.0, some, dtype)
    optimizer = EPS_ZERO[name]([dead, alive])
    for _ in range(3):
        optimizer.step()
    assert torch.equal(dead, torch.ones_like(dead))
    assert torch.equal(alive < 1, some > 0)
    assert torch.isfinite(alive).all()


@pytest.mark.parametrize("name", EPS_ZERO)
def test_a_nan_is_not_hidden(name: str) -> None:
    param = weight_of(1.0, torch.tensor([[math.nan, 0.0], [1.0, 1.0]]))
    EPS_ZERO[name]([param]).step()
    assert param[0, 0].isnan()


def test_ratios_of_novograd() -> None:
    """1 / |g| at the first step; 1 for a layer without gradient, however long; none for exempt
    layers."""
    alive, dead, bias = weight_of(1.0, 3.0), weight_of(1.0, 0.0), nn.Parameter(torch.ones(2))
    bias.grad = torch.ones(2)
    optimizer = NovoGrad([alive, dead, bias], lr=0.1)
    for _ in range(2):
        optimizer.step()
        assert optimizer.trust_ratios() == pytest.approx({0: 1 / 6, 1: 1.0})
    alive.grad = torch.zeros_like(alive)
    optimizer.step()
    assert optimizer.trust_ratios() == {0: 1.0, 1: 1.0}
    dead.grad = torch.full_like(dead, 2.0)
    optimizer.step()
    assert optimizer.trust_ratios()[1] == pytest.approx(1 / 4)  # its first gradient
