"""Rates as functions of samples seen, against torch's schedulers and by their ends."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from allstep.optim import SCALINGS, SCHEDULES, constant, cosine, linear, linear_scaling, no_scaling, warm_up


def torch_factors(make: type[torch.optim.lr_scheduler.LRScheduler], steps: int, **options: float) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = make(optimizer, **options)  # type: ignore[arg-type]
    factors = []
    for _ in range(steps):
        factors.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return factors


def test_cosine_is_torchs() -> None:
    reference = torch_factors(torch.optim.lr_scheduler.CosineAnnealingLR, 50, T_max=50)
    assert [cosine(step * 32, 50 * 32) for step in range(50)] == pytest.approx(reference)


def test_linear_is_torchs() -> None:
    options = {"start_factor": 1.0, "end_factor": 0.0, "total_iters": 50}
    reference = torch_factors(torch.optim.lr_scheduler.LinearLR, 50, **options)
    assert [linear(step * 32, 50 * 32) for step in range(50)] == pytest.approx(reference)


@settings(deadline=None)
@given(name=st.sampled_from(sorted(SCHEDULES)), seen=st.floats(-1e9, 1e9), total=st.floats(-1e6, 1e9))
def test_factors_lie_between_0_and_1(name: str, seen: float, total: float) -> None:
    assert 0.0 <= SCHEDULES[name](seen, total) <= 1.0


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_the_ends(name: str) -> None:
    assert SCHEDULES[name](0, 1000) == 1.0
    assert SCHEDULES[name](-5, 0) == 1.0  # a run that is all warm-up does not start at its end
    assert SCHEDULES[name](1000, 1000) == pytest.approx(1.0 if name == "constant" else 0.0)


def test_warm_up() -> None:
    assert [warm_up(seen, 100) for seen in (0, 25, 100, 200)] == [0.0, 0.25, 1.0, 1.0]
    assert warm_up(0, 0) == 1.0
    assert constant(5, 10) == 1.0


def test_scaling() -> None:
    assert linear_scaling(0.1, 512, 128) == pytest.approx(0.4)
    assert no_scaling(0.1, 512, 128) == 0.1
    assert set(SCALINGS) == {"linear", "none"}
