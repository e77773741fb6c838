"""Rates as functions of samples seen, against torch's schedulers and by their ends."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from allstep.errors import ConfigError
from allstep.optim import (
    SCALINGS,
    SCHEDULES,
    WARM_UPS,
    Rate,
    constant,
    cosine,
    exponential,
    linear,
    linear_scaling,
    momentum_correction,
    no_scaling,
    one_cycle,
    polynomial,
    square_root_scaling,
    steps,
    warm_up,
)


def torch_factors(
    make: type[torch.optim.lr_scheduler.LRScheduler], count: int, **options: object
) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = make(optimizer, **options)  # type: ignore[arg-type]
    factors = []
    for _ in range(count):
        factors.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return factors


schedulers = torch.optim.lr_scheduler
SAME = {
    "cosine": (cosine, schedulers.CosineAnnealingLR, {"T_max": 50}),
    "linear": (
        linear,
        schedulers.LinearLR,
        {"start_factor": 1.0, "end_factor": 0.0, "total_iters": 50},
    ),
    "steps": (
        steps((0.3, 0.6), 0.5),
        schedulers.MultiStepLR,
        {"milestones": [15, 30], "gamma": 0.5},
    ),
    "polynomial": (polynomial(2.0), schedulers.PolynomialLR, {"total_iters": 50, "power": 2.0}),
    "exponential": (exponential(0.01), schedulers.ExponentialLR, {"gamma": 0.01 ** (1 / 50)}),
}


@pytest.mark.parametrize("name", SAME)
def test_as_torchs(name: str) -> None:
    ours, theirs, options = SAME[name]
    reference = torch_factors(theirs, 50, **options)
    assert [ours(step * 32, 50 * 32) for step in range(50)] == pytest.approx(reference)


def test_one_cycle_is_torchs() -> None:
    """torch's cycle goes from its first to its last step, so of 51 steps there are 50 ways between;
    its rise ends one step early."""
    options = {"max_lr": 1.0, "total_steps": 51, "pct_start": 16 / 51, "cycle_momentum": False}
    reference = torch_factors(torch.optim.lr_scheduler.OneCycleLR, 50, **options)
    assert [one_cycle(0.3)(step, 50) for step in range(50)] == pytest.approx(reference)


@settings(deadline=None)
@given(
    name=st.sampled_from(sorted(SCHEDULES)), seen=st.floats(-1e9, 1e9), total=st.floats(-1e6, 1e9)
)
def test_factors_lie_between_0_and_1(name: str, seen: float, total: float) -> None:
    assert 0.0 <= SCHEDULES[name](seen, total) <= 1.0


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_the_ends(name: str) -> None:
    start = {"one-cycle": 0.04}.get(name, 1.0)
    end = {"constant": 1.0, "step": 0.001, "exponential": 0.01, "one-cycle": 4e-6}.get(name, 0.0)
    assert SCHEDULES[name](0, 1000) == pytest.approx(start)
    assert SCHEDULES[name](-5, 0) == pytest.approx(
        start
    )  # a run that is all warm-up does not start at its end
    assert SCHEDULES[name](1000, 1000) == pytest.approx(end)


@pytest.mark.parametrize(
    "make",
    [
        lambda: steps((0.5, 0.2)),
        lambda: steps((0.0,)),
        lambda: steps((0.5,), 2.0),
        lambda: polynomial(0.0),
        lambda: exponential(0.0),
        lambda: one_cycle(1.0),
    ],
)
def test_shapes_that_cannot_be(make: object) -> None:
    with pytest.raises(ConfigError):
        make()  # type: ignore[operator]


def test_warm_up() -> None:
    assert [warm_up(seen, 100) for seen in (0, 25, 100, 200)] == [0.0, 0.25, 1.0, 1.0]
    assert warm_up(0, 0) == 1.0
    assert [WARM_UPS["constant"](seen, 100) for seen in (0, 99, 100)] == [0.0, 0.0, 1.0]
    assert constant(5, 10) == WARM_UPS["none"](0, 10) == 1.0


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("gradual", [0.1 + 0.9 * 0.25, 0.1 + 0.9 * 0.5, 1.0, 0.5, 0.0]),
        ("constant", [0.1, 0.1, 1.0, 0.5, 0.0]),
        ("none", [1.0, 11 / 12, 8 / 12, 4 / 12, 0.0]),
    ],
)
def test_a_rate(kind: str, expected: list[float]) -> None:
    """Batches of 100, a warm-up of 400 samples from a tenth, in a run of 1200."""
    rate = Rate(peak=1.0, start=0.1, warmup=400, total=1200, batch=100, shape=linear, warm_up=kind)
    assert [rate(seen) for seen in (0, 100, 400, 800, 1200)] == pytest.approx(expected)


def test_past_the_end_and_other_nonsense() -> None:
    rate = Rate(peak=1.0, total=1000)
    for seen in (1001, -1, float("nan")):
        with pytest.raises(
            ConfigError,
            match=f"covers 1000 samples, but the learning rate after {seen:g} was requested",
        ):
            rate(seen)
    for options in ({"warmup": 1001}, {"total": 0}, {"peak": -1.0}, {"warm_up": "gradal"}):
        with pytest.raises(ConfigError):
            Rate(**{"peak": 1.0, "total": 1000, **options})  # type: ignore[arg-type]


def test_scaling() -> None:
    assert linear_scaling(0.1, 512, 128) == pytest.approx(0.4)
    assert square_root_scaling(0.1, 512, 128) == pytest.approx(0.2)
    assert no_scaling(0.1, 512, 128) == 0.1
    assert set(SCALINGS) == {"linear", "square-root", "none"}


def test_momentum_correction() -> None:
    """torch's SGD, whose rate changes at each step, against the other form of momentum with the
    correction."""
    weight = torch.nn.Parameter(torch.tensor([2.0], dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    other, velocity, before = 2.0, 0.0, 0.0
    for step in range(1, 30):
        rate = 0.01 * (1 + step % 5)
        optimizer.param_groups[0]["lr"] = rate
        weight.grad = weight.detach() * 0.5
        optimizer.step()
        velocity = momentum_correction(0.9, rate, before) * velocity + rate * other * 0.5
        other, before = other - velocity, rate
    assert weight.item() == pytest.approx(other, rel=1e-12)
