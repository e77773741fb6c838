"""LARS, LARC, LAMB and NovoGrad: step by step against numpy and pytorch-optimizer, and what torch
expects of an optimizer."""

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from allstep.errors import ConfigError, UserError
from allstep.optim import LAMB, LARC, LARS, NovoGrad, groups
from support import numpy_optimizers
from support.numpy_optimizers import gradients, start

STEPS = 200
Make = Callable[..., torch.optim.Optimizer]
CLASSES: dict[str, Make] = {"lars": LARS, "larc": LARC, "lamb": LAMB, "novograd": NovoGrad}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("lars", {"lr": 0.5, "trust_coefficient": 0.01}),
    ("lars", {"lr": 0.5, "trust_coefficient": 0.01, "weight_decay": 0.1, "nesterov": True}),
    ("lars", {"lr": 0.5, "trust_coefficient": 0.01, "weight_decay": 0.1, "momentum": 0.0}),
    ("larc", {"lr": 0.02, "trust_coefficient": 0.02, "weight_decay": 0.1}),
    ("larc", {"lr": 0.02, "trust_coefficient": 0.02, "nesterov": True}),
    ("larc", {"lr": 2.0, "trust_coefficient": 0.02, "weight_decay": 0.1}),
    ("lamb", {"lr": 0.01}),
    ("lamb", {"lr": 0.01, "weight_decay": 0.1, "betas": (0.8, 0.95), "eps": 1e-3}),
    ("novograd", {"lr": 0.01}),
    ("novograd", {"lr": 0.1, "weight_decay": 0.1, "betas": (0.9, 0.5), "grad_averaging": True}),
]


def parameters(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    return [nn.Parameter(torch.tensor(weight, dtype=dtype)) for weight in start()]


def set_gradients(
    params: list[nn.Parameter], step: int, sign: float = 1.0, **options: bool
) -> None:
    found = gradients([param.detach().double().numpy() for param in params], step, **options)
    for param, gradient in zip(params, found, strict=True):
        param.grad = torch.tensor(sign * gradient, dtype=param.dtype)


def assert_equal(ours: list[nn.Parameter], theirs: Any, tolerance: float) -> None:
    for mine, reference in zip(ours, theirs, strict=True):
        found, expected = (
            mine.detach().double().numpy(),
            np.asarray(torch.as_tensor(reference).double()),
        )
        error = np.abs(found - expected).max()
        assert error <= tolerance * (1 + np.abs(expected).max()), f"{error} from {expected}"


@pytest.mark.parametrize("exempt", [None, False, True])
@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_as_numpy(name: str, options: dict[str, Any], exempt: bool | None) -> None:
    params, weights = parameters(), start()
    optimizer, reference = (
        CLASSES[name](params, exempt=exempt, **options),
        getattr(numpy_optimizers, name),
    )
    states: list[dict[str, Any]] = [{} for _ in weights]
    for step in range(1, STEPS + 1 if exempt is None else 20):
        set_gradients(params, step)
        optimizer.step()
        found = gradients(weights, step)
        for number, weight in enumerate(weights):
            leave = weight.ndim < 2 if exempt is None else exempt
            weights[number] = np.asarray(
                reference(weight, found[number], states[number], step, leave, options)
            )
        assert_equal(params, weights, 1e-9)


def peer(name: str, params: list[nn.Parameter]) -> tuple[torch.optim.Optimizer, dict[str, Any]]:
    """pytorch-optimizer's class, with what it does beside the papers switched off, and our options
    for the same."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import pytorch_optimizer as peers
    if name == "lars":
        options = {"lr": 0.5, "weight_decay": 0.1, "trust_coefficient": 0.01}
        return peers.LARS(params, momentum=0.9, **options), options
    if name == "lars nesterov":
        options = {"lr": 0.5, "weight_decay": 0.1, "trust_coefficient": 0.01, "nesterov": True}
        return peers.LARS(params, momentum=0.9, **options), options
    options = {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-12}
    if name == "novograd":
        return peers.NovoGrad(params, **options), {**options, "exempt": False}
    reference = peers.Lamb(params, weight_decouple=False, adam_debias=True, **options)
    reference.clamp = float("inf")
    return reference, {**options, "bias_correction": False, "exempt": False}


@pytest.mark.usefixtures("peers")
@pytest.mark.parametrize("name", ["lars", "lars nesterov", "lamb", "novograd"])
def test_as_pytorch_optimizer(name: str) -> None:
    ours, theirs = parameters(), parameters()
    reference, options = peer(name, theirs)
    optimizer = CLASSES[name.split()[0]](ours, **options)
    for step in range(1, STEPS + 1):
        for params, each in ((ours, optimizer), (theirs, reference)):
            set_gradients(params, step, zero_at_first=False)
            each.step()
        assert_equal(ours, [param.detach() for param in theirs], 1e-6)


@pytest.mark.parametrize("name", CLASSES)
def test_in_float32_and_half(name: str) -> None:
    """Against float64: the norms of half-precision tensors are computed in float32."""
    exact = parameters()
    tight, loose = parameters(torch.float32), parameters(torch.bfloat16)
    for params in (exact, tight, loose):
        optimizer = CLASSES[name](params, lr=0.01)
        for step in range(1, 6):
            set_gradients(params, step)
            optimizer.step()
    assert_equal(tight, [param.detach() for param in exact], 1e-5)
    assert_equal(loose, [param.detach() for param in exact], 0.1)
    large = nn.Parameter(torch.full((300, 300), 60000.0, dtype=torch.float16))
    large.grad = torch.full_like(large, 60000.0)
    CLASSES[name]([large], lr=0.01, weight_decay=0.0).step()
    assert torch.isfinite(large).all()


@pytest.mark.parametrize("name", CLASSES)
def test_maximize_closures_and_untouched_gradients(name: str) -> None:
    down, up = parameters(), parameters()
    descent, ascent = CLASSES[name](down, lr=0.01), CLASSES[name](up, lr=0.01, maximize=True)
    for step in range(1, 4):
        set_gradients(down, step)
        descent.step()
        calls = []

        def closure(step: int = step, calls: list[bool] = calls) -> float:
            calls.append(torch.is_grad_enabled())
            set_gradients(up, step, sign=-1.0)
            return 3.5

        assert ascent.step(closure) == 3.5
        assert calls == [True]
    assert_equal(up, [param.detach() for param in down], 1e-14)
    kept = [param.grad.clone() for param in down if param.grad is not None]
    descent.step()
    assert all(torch.equal(param.grad, before) for param, before in zip(down, kept, strict=True))


def run(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], steps: range) -> None:
    for step in steps:
        set_gradients(params, step)
        optimizer.step()


@pytest.mark.parametrize("name", CLASSES)
def test_state_goes_round(name: str) -> None:
    """By state_dict, by pickle and by deepcopy: all go on as if nothing had happened."""
    params = parameters()
    optimizer = CLASSES[name](params, lr=0.01, weight_decay=0.1)
    run(optimizer, params, range(1, 6))
    others = [nn.Parameter(param.detach().clone()) for param in params]
    other = CLASSES[name](others, lr=0.5)
    other.load_state_dict(pickle.loads(pickle.dumps(optimizer.state_dict())))
    copies = copy.deepcopy(optimizer)
    copied = copies.param_groups[0]["params"]
    run(optimizer, params, range(6, 11))
    run(other, others, range(6, 11))
    run(copies, copied, range(6, 11))
    assert_equal(others, [param.detach() for param in params], 0.0)
    assert_equal(copied, [param.detach() for param in params], 0.0)
    assert copies.trust_ratios() == optimizer.trust_ratios()  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", CLASSES)
def test_groups_late_and_unused_parameters(name: str) -> None:
    """Each tensor steps as it would alone: groups with options, one that joins later, one without a
    gradient, two dtypes."""
    params = [*parameters(), nn.Parameter(torch.ones(2, 2, dtype=torch.float32))]
    alone = [nn.Parameter(param.detach().clone()) for param in params]
    together = CLASSES[name]([{"params": params[:2]}, {"params": params[2:], "lr": 0.5}], lr=0.01)
    for number, param in enumerate(alone):
        single = CLASSES[name]([param], lr=0.01 if number < 2 else 0.5)
        for step in range(3 if number == 2 else 1, 5):
            param.grad = torch.full_like(param, 0.1 * step)
            single.step()
    for step in range(1, 5):
        for number, param in enumerate(params):
            param.grad = None if number == 2 and step < 3 else torch.full_like(param, 0.1 * step)
        together.step()
    assert_equal(params, [param.detach() for param in alone], 1e-7)


def test_trust_ratios() -> None:
    """Those of the last step, by name, against the formula; exempt layers have none."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double()
    optimizer = LARS(groups(model), lr=1.0, weight_decay=0.5)
    assert optimizer.trust_ratios() == {}
    expected = {}
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(5, 3, dtype=torch.float64)).square().sum().backward()
        for name, param in model.named_parameters():
            if param.dim() > 1:
                expected[name] = float(
                    0.001 * param.data.norm() / (param.grad.norm() + 0.5 * param.data.norm())
                )
        optimizer.step()
    assert optimizer.trust_ratios() == pytest.approx(expected)
    numbered = LAMB([param.detach().requires_grad_() for param in model.parameters()])
    for param in numbered.param_groups[0]["params"]:
        param.grad = torch.ones_like(param)
    numbered.step()
    assert list(numbered.trust_ratios()) == [0, 2]


def test_larc_never_goes_faster_than_its_rate() -> None:
    params = parameters()
    optimizer = LARC(params, lr=0.02, trust_coefficient=0.02, exempt=False)
    run(optimizer, params, range(2, 20))
    ratios = optimizer.trust_ratios()
    assert max(ratios.values()) == 1.0
    assert min(ratios.values()) < 0.1
    optimizer.param_groups[0]["lr"] = 0.0
    run(optimizer, params, range(20, 22))
    assert all(torch.isfinite(param).all() for param in params)


def test_groups() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Linear(2, 2))
    scaled, exempt = groups(model)
    assert scaled["param_names"] == ["0.weight", "2.weight"]
    assert exempt["param_names"] == ["0.bias", "1.weight", "1.bias", "2.bias"]
    assert (scaled["exempt"], exempt["exempt"], exempt["weight_decay"]) == (False, True, 0.0)
    plain = torch.optim.SGD(groups(model), lr=0.1, weight_decay=0.5)
    assert [group["weight_decay"] for group in plain.param_groups] == [0.5, 0.0]
    (everything,) = groups(model.named_parameters(), exempt=lambda name, parameter: False)
    assert len(everything["params"]) == 6
    with pytest.raises(ConfigError, match="no parameters"):
        groups(nn.ReLU())


@pytest.mark.parametrize("name", CLASSES)
def test_what_is_refused(name: str) -> None:
    make, weight = CLASSES[name], nn.Parameter(torch.ones(2, 2))
    for options in (
        {"lr": -1.0},
        {"weight_decay": -0.1},
        {"lr": float("nan")},
        {"lr": torch.tensor(0.1)},
    ):
        with pytest.raises(UserError, match=next(iter(options))):
            make([weight], **{"lr": 0.1, **options})
    with pytest.raises(UserError, match=r"complex64.*view_as_real"):
        make([nn.Parameter(torch.ones(2, dtype=torch.complex64))], lr=0.1)
    optimizer = make([weight], lr=0.1)
    with pytest.raises(UserError, match="lr"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], "lr": -1.0})
    assert len(optimizer.param_groups) == 1
    with pytest.raises(
        UserError, match=r"none of 1 parameters has a gradient; call loss.backward\(\)"
    ):
        optimizer.step()
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(UserError, match=r"dense gradients.*\[4, 2\].*sparse=False"):
        make(table.parameters(), lr=0.1).step()


def test_more_that_is_refused() -> None:
    weight: list[Tensor] = [nn.Parameter(torch.ones(2, 2))]
    for options in (
        {"momentum": 1.0},
        {"trust_coefficient": 0.0},
        {"nesterov": True, "momentum": 0.0},
    ):
        with pytest.raises(ConfigError, match=f"LARS: {next(iter(options))}"):
            LARS(weight, lr=0.1, **options)
    with pytest.raises(ConfigError, match="LAMB: betas"):
        LAMB(weight, betas=(0.9, 1.0))
    with pytest.raises(ConfigError, match="NovoGrad: eps"):
        NovoGrad(weight, eps=-1.0)


def test_a_frozen_model_steps_nowhere() -> None:
    LARS([torch.ones(2, 2)], lr=0.1).step()
