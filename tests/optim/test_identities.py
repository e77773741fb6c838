"""Where the layer-wise optimizers must be one of torch's own: with the ratio taken out, by hand or
by the options."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from allstep.optim import LAMB, LARC, LARS

STEPS = 60
SHAPES = [(4, 3), (5,), (2, 3, 2)]


def parameters() -> list[nn.Parameter]:
    draws = torch.Generator().manual_seed(0)
    return [
        nn.Parameter(torch.randn(shape, generator=draws, dtype=torch.float64)) for shape in SHAPES
    ]


def set_gradients(params: list[nn.Parameter], step: int) -> None:
    """Of a bowl whose bottom moves about."""
    draws = torch.Generator().manual_seed(step)
    for param in params:
        noise = torch.randn(param.shape, generator=draws, dtype=torch.float64)
        param.grad = 0.3 * param.detach() - noise


def run_alike(ours: torch.optim.Optimizer, theirs: torch.optim.Optimizer) -> None:
    pairs = [(each, each.param_groups[0]["params"]) for each in (ours, theirs)]
    for step in range(1, STEPS + 1):
        for optimizer, params in pairs:
            set_gradients(params, step)
            optimizer.step()
        for mine, other in zip(pairs[0][1], pairs[1][1], strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.5, 0.7)])
def test_lamb_without_ratio_is_adam(betas: tuple[float, float]) -> None:
    """Exempt layers have the ratio 1 and no decay; so the bias correction is all that could differ."""
    ours = LAMB(parameters(), lr=0.1, betas=betas, eps=1e-3, exempt=True, weight_decay=0.5)
    run_alike(ours, torch.optim.Adam(parameters(), lr=0.1, betas=betas, eps=1e-3))


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_lamb_is_adamw_at_the_length_of_the_weights(decay: float) -> None:
    """AdamW moves w by lr * (r + decay * w).

    From the same weights LAMB goes the same way, lr * |w| far.
    """
    options: dict[str, Any] = {"lr": 0.01, "weight_decay": decay, "eps": 1e-6}
    ours, theirs = parameters(), parameters()
    lamb, adamw = LAMB(ours, exempt=False, **options), torch.optim.AdamW(theirs, **options)
    for step in range(1, STEPS + 1):
        before = [param.detach().clone() for param in ours]
        for param, weight in zip(theirs, before, strict=True):
            param.data.copy_(weight)  # its moments are those of the gradients, whatever the weights
        set_gradients(ours, step)
        set_gradients(theirs, step)
        lamb.step()
        adamw.step()
        check_length(lamb, ours, theirs, before)


def check_length(
    lamb: LAMB, ours: list[nn.Parameter], theirs: list[nn.Parameter], before: list[Tensor]
) -> None:
    ratios = lamb.trust_ratios()
    for number, weight in enumerate(before):
        direction = (weight - theirs[number].detach()) / 0.01
        ratio = weight.norm() / direction.norm()
        assert ratios[number] == pytest.approx(float(ratio), rel=1e-9)
        torch.testing.assert_close(
            ours[number].detach(), weight - 0.01 * ratio * direction, rtol=1e-11, atol=1e-11
        )


@pytest.mark.parametrize("more", [{}, {"nesterov": True}, {"momentum": 0.0}], ids=str)
@pytest.mark.parametrize("lr", [0.05, 1.5])
def test_larc_that_holds_nobody_back_is_sgd(lr: float, more: dict[str, Any]) -> None:
    options = {"lr": lr, "momentum": 0.9, "weight_decay": 0.1, **more}
    ours = LARC(parameters(), trust_coefficient=1e9, exempt=False, **options)
    run_alike(ours, torch.optim.SGD(parameters(), **options))
    assert set(ours.trust_ratios().values()) == {1.0}


@pytest.mark.parametrize("lr", [0.9, 50.0])
def test_larc_that_holds_all_back_is_lars_at_rate_one(lr: float) -> None:
    """Its rate is then eta * |w| / (|g| + d * |w|), whatever the rate given."""
    options: dict[str, Any] = {
        "momentum": 0.9,
        "weight_decay": 0.1,
        "trust_coefficient": 0.02,
        "exempt": False,
    }
    ours = LARC(parameters(), lr=lr, **options)
    run_alike(ours, LARS(parameters(), lr=1.0, **options))
    assert max(ours.trust_ratios().values()) < 1.0
