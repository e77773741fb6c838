"""DiLoCo's outer step: torch's Nesterov step, and defaults that depend on the inner optimizer."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from allstep.parallel.sync_mode import sync_mode
from allstep.parallel.updates.outer_step import PLAIN, OuterStep, outer_step

ADAMW = torch.optim.AdamW


def momentum(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, 0.1, momentum=0.9)


def test_it_is_torchs_nesterov_step() -> None:
    torch.manual_seed(0)
    weights, velocity = torch.randn(5, dtype=torch.float64), torch.zeros(5, dtype=torch.float64)
    theirs = nn.Parameter(weights.clone())
    optimizer = torch.optim.SGD([theirs], 0.7, momentum=0.9, nesterov=True)
    for _ in range(5):
        after = theirs.detach() + torch.randn(5, dtype=torch.float64)
        OuterStep(0.7, 0.9).update(weights, weights - after, velocity)
        theirs.grad = theirs.detach() - after
        optimizer.step()
        torch.testing.assert_close(weights, theirs.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("make", "mode", "expected"),
    [
        (momentum, "diloco:4", OuterStep(0.7, 0.5)),
        (momentum, "diloco:32", OuterStep(0.7, 0.7)),
        (ADAMW, "diloco:4", OuterStep(0.7, 0.7)),
        (ADAMW, "diloco:32", OuterStep(0.7, 0.9)),
        (ADAMW, "local:32", PLAIN),
    ],
)
def test_defaults(
    make: Callable[[Any], torch.optim.Optimizer], mode: str, expected: OuterStep
) -> None:
    optimizer = make(nn.Linear(2, 2).parameters())
    assert outer_step(optimizer, sync_mode(mode)) == expected


def test_settings_replace_defaults() -> None:
    optimizer = ADAMW(nn.Linear(2, 2).parameters())
    assert outer_step(optimizer, sync_mode("diloco:8"), 1.0, 0.0) == OuterStep(1.0, 0.0)
    assert outer_step(optimizer, sync_mode("diloco:8"), None, 0.3) == OuterStep(0.7, 0.3)
