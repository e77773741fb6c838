"""Parameters of 16 bits: state goes round by state_dict to the same bits, and ratios that no
float16 can hold do no harm."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import allstep.torch as hvd
from allstep.optim import LAMB, LARC, LARS, NovoGrad
from allstep.optim.layerwise import LayerWise
from support.hvd_ranks import running
from support.ranks import Ranks

CLASSES: list[type[LayerWise]] = [LARS, LARC, LAMB, NovoGrad]
HALVES = [torch.bfloat16, torch.float16]


def parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    draws = torch.Generator().manual_seed(0)
    return [
        nn.Parameter(torch.randn(shape, generator=draws).to(dtype)) for shape in [(40, 30), (5,)]
    ]


def run(optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        draws = torch.Generator().manual_seed(step)
        optimizer.zero_grad()
        for param in optimizer.param_groups[0]["params"]:
            slope = (20 * torch.randn(param.shape, generator=draws)).to(
                param.dtype
            )  # |g|^2 is beyond a float16
            (param * slope).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("make", CLASSES)
def test_state_goes_round(make: Any, dtype: torch.dtype) -> None:
    one, other = make(parameters(dtype), lr=0.01), make(parameters(dtype), lr=0.5)
    run(one, range(5))
    saved = pickle.loads(pickle.dumps(one.state_dict()))
    other.load_state_dict(saved)
    params, others = one.param_groups[0]["params"], other.param_groups[0]["params"]
    for number, param in enumerate(params):
        others[number].data.copy_(param)
        assert_same(other.state[others[number]], one.state[param])
    run(one, range(5, 9))
    run(other, range(5, 9))
    for mine, theirs in zip(params, others, strict=True):
        assert torch.equal(mine, theirs)
        assert torch.isfinite(mine).all()


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert found[name].dtype == value.dtype, name
            assert torch.equal(found[name], value), name
        else:
            assert found[name] == value, name


def test_state_of_parameters_of_another_type() -> None:
    """From bfloat16 into float64 and back, by way of a hook that changes what is loaded, as torch
    lets hooks do."""
    half, double = NovoGrad(parameters(torch.bfloat16)), NovoGrad(parameters(torch.float64))
    run(half, range(3))
    double.register_load_state_dict_pre_hook(
        lambda _, given: {**given, "state": {0: given["state"][0]}}
    )
    double.load_state_dict(half.state_dict())
    first, second = double.param_groups[0]["params"]
    assert {value.dtype for value in double.state[first].values()} == {torch.float64}
    assert second not in double.state
    run(double, range(3, 4))
    half.load_state_dict(double.state_dict())
    state = half.state[half.param_groups[0]["params"][0]]
    assert (state["exp_avg"].dtype, state["exp_avg_sq"].dtype) == (torch.bfloat16, torch.float32)
    run(half, range(4, 5))


@pytest.mark.parametrize("dtype", HALVES)
def test_lamb_of_small_gradients(dtype: torch.dtype) -> None:
    """Gradients of 0.001 fall to a tenth: their squares and the means of these, against float64.

    Weights start anew: they are rounded.
    """
    ratios = []
    for each in (dtype, torch.float64):
        param = nn.Parameter(torch.full((4, 4), 8.0, dtype=each))
        optimizer = LAMB([param], lr=0.1, eps=1e-8, betas=(0.9, 0.99))
        for step in range(120):
            param.data.fill_(8.0)
            param.grad = torch.full((4, 4), 1e-3 if step < 60 else 1e-4, dtype=each)
            optimizer.step()
        assert (param < 8.0).all()
        ratios.append(optimizer.trust_ratios()[0])
    assert ratios[0] == pytest.approx(ratios[1], rel=0.03)


@pytest.mark.parametrize("make", [LARS, NovoGrad])
def test_ratios_beyond_a_float16(make: Any) -> None:
    """Gradients of 1e-7: the ratio is about 1e5 to 1e6. Against the same step in float64."""
    steps = []
    for dtype in (torch.float16, torch.float64):
        param = nn.Parameter(torch.full((4, 4), 8.0, dtype=dtype))
        param.grad = torch.full(
            (4, 4), 1.1920929e-07, dtype=dtype
        )  # two of the smallest steps of a float16
        make([param], lr=0.5, **({"trust_coefficient": 0.1} if make is LARS else {})).step()
        steps.append(8.0 - param.detach().double())
    torch.testing.assert_close(steps[0], steps[1], rtol=0.03, atol=0)


def test_shared_state_goes_round(ranks: Ranks) -> None:
    """With weights that ranks share: the state lies in shared memory, and loading goes through the
    wrapper."""
    ranks(2, share_and_load)


def share_and_load() -> None:
    with running():
        go_on_with_shared_state(NovoGrad)
        go_on_with_shared_state(LAMB)


def go_on_with_shared_state(make: Any) -> None:
    one, other = (shared(make(parameters(torch.float16), lr=0.01)) for _ in range(2))
    run(one, range(3))
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    for mine, theirs in zip(
        one.param_groups[0]["params"], other.param_groups[0]["params"], strict=True
    ):
        theirs.data.copy_(mine)
    hvd.barrier()
    run(one, range(3, 6))
    run(other, range(3, 6))
    for mine, theirs in zip(
        one.param_groups[0]["params"], other.param_groups[0]["params"], strict=True
    ):
        assert torch.equal(mine, theirs)
    assert one.state_dict()["state"][0]["exp_avg_sq"].dtype == torch.float32


def shared(optimizer: LayerWise) -> Any:
    return hvd.DistributedOptimizer(optimizer, share_weights=True)
