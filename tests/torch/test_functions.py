"""Parameters, optimizers and objects that come to all ranks."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import allstep.torch as hvd
from allstep.hvd.handles import enqueue_group
from allstep.torch import functions
from support.hvd_ranks import in_worlds, run_checks
from support.ranks import Ranks

OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda params: torch.optim.Adam(params, lr=0.1, amsgrad=True, betas=(0.8, 0.9)),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.1),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.1, centered=True),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
    "asgd": lambda params: torch.optim.ASGD(params, lr=0.1),
    "rprop": lambda params: torch.optim.Rprop(params, lr=0.1),
}


@in_worlds
def test_spreading(ranks: Ranks, hosts: list[str]) -> None:
    whole = spread_parameters, spread_objects, spread_optimizers
    run_checks(ranks, hosts, *whole, spread_in_one_request, spread_any_tensors)


def spread_parameters(rank: int, size: int) -> None:
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3))
    model[1].num_batches_tracked.fill_(rank + 5)
    torch.manual_seed(size - 1)
    roots = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3)).state_dict()
    before = [parameter._version for parameter in model.parameters()]
    assert hvd.broadcast_parameters(model.state_dict(), root_rank=size - 1) is None
    for name, tensor in model.state_dict().items():
        expected = torch.tensor(size + 4) if name.endswith("tracked") else roots[name]
        torch.testing.assert_close(tensor, expected, rtol=0, atol=0)
    assert [parameter._version for parameter in model.parameters()] == before  # unseen by autograd
    for params in (lambda: list(model.named_parameters()), lambda: list(model.parameters())):
        with torch.no_grad():
            model[0].bias.fill_(rank)
        hvd.broadcast_parameters(params(), root_rank=0)
        assert model[0].bias.tolist() == [0] * 3
    for wrong in (model.named_parameters(), model.parameters(), 7):
        with pytest.raises(ValueError, match="invalid params"):
            hvd.broadcast_parameters(wrong, root_rank=0)


def spread_objects(rank: int, size: int) -> None:
    root = size - 1
    mine = {"rank": rank, "call": lambda number: number + rank} if rank == root else "another type"
    found = hvd.broadcast_object(mine, root_rank=root)
    assert found["rank"] == root and found["call"](1) == root + 1
    assert (found is mine) == (rank == root)
    assert hvd.broadcast_object(None, 0, name="nothing") is None
    large = list(range(100_000 * (rank + 1)))
    assert hvd.allgather_object(len(large)) == [100_000 * (each + 1) for each in range(size)]
    assert hvd.allgather_object({"of": rank, "data": large}, name="large")[-1] == {
        "of": root,
        "data": list(range(100_000 * size)),
    }
    hvd.barrier()


def spread_optimizers(rank: int, size: int) -> None:
    for name, make in OPTIMIZERS.items():
        for steps in ([2, 0, 5], [0, 3, 1], [1, 1, 1]):  # which ranks have a state before
            model = trained(make, rank, steps[rank])
            hvd.broadcast_parameters(model[0].state_dict(), 0)
            weights = copy.deepcopy(model[0].state_dict())
            groups = list(model[1].param_groups)
            hvd.broadcast_optimizer_state(model[1], root_rank=0)
            assert all(
                a is b for a, b in zip(groups, model[1].param_groups, strict=True)
            )  # schedulers hold them
            roots_model, roots = trained(make, 0, steps[0])
            same_state(name, model[1].state_dict(), roots.state_dict())
            torch.testing.assert_close(dict(model[0].state_dict()), dict(weights), rtol=0, atol=0)
            step(*model)
            step(roots_model, roots)
            torch.testing.assert_close(
                dict(model[0].state_dict()), dict(roots_model.state_dict()), rtol=0, atol=0
            )
    net = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="LBFGS"):
        hvd.broadcast_optimizer_state(torch.optim.LBFGS(net.parameters()), 0)
    if size > 1:
        more = [{"params": [p]} for p in net.parameters()] if rank else list(net.parameters())
        uneven = torch.optim.SGD(more, lr=0.1)
        if rank:
            with pytest.raises(ValueError, match=r"the root has 1 param groups, rank \d has 2"):
                hvd.broadcast_optimizer_state(uneven, 0)
        else:
            hvd.broadcast_optimizer_state(uneven, 0)


def spread_in_one_request(rank: int, size: int) -> None:
    """All tensors of a call are one group, under the names of single broadcasts.

    So a rank that requests each tensor by itself, as Horovod does, meets the others.
    """
    torch.manual_seed(rank)
    weights = {name: torch.randn(3) for name in ("a", "b", "c")}
    torch.manual_seed(0)
    expected = {name: torch.randn(3) for name in weights}
    groups: list[int] = []

    def counted(requests: Any) -> int:
        groups.append(len(requests))
        return enqueue_group(requests)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functions, "enqueue_group", counted)
        if rank == 0:
            handles = [hvd.broadcast_async_(weights[name], 0, name) for name in reversed(weights)]
            for handle in handles:
                hvd.synchronize(handle)
        else:
            hvd.broadcast_parameters(weights, root_rank=0)
        assert groups == ([3] if rank else [])
        torch.testing.assert_close(weights, expected, rtol=0, atol=0)
        groups.clear()
        model, optimizer = trained(OPTIMIZERS["momentum"], rank, 1)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        assert groups == [len([each for each in model.parameters() if each.requires_grad])]
        hvd.broadcast_parameters({}, root_rank=0)
        assert len(groups) == 1


def spread_any_tensors(rank: int, size: int) -> None:
    """Small tensors of one type are sent in one buffer, whatever their layout."""
    last = size - 1
    dtypes = torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64
    made = {
        f"{dtype} {shape}": torch.full(shape, rank + 1).to(dtype)
        for dtype in (*dtypes, torch.float8_e4m3fn)
        for shape in ((), (3,), (0, 2), (2, 3))
    }
    made["transposed"] = torch.arange(6.0).view(2, 3).t() + rank
    layout = made["transposed"].stride()
    expected = {
        name: torch.full(each.shape, last + 1).to(each.dtype) for name, each in made.items()
    }
    expected["transposed"] = torch.arange(6.0).view(2, 3).t() + last
    hvd.broadcast_parameters(made, root_rank=last)
    for name, tensor in made.items():
        assert torch.equal(tensor.to(torch.complex64), expected[name].to(torch.complex64)), name
    assert made["transposed"].stride() == layout
    inputs = [torch.full((2,), rank + float(each)) for each in range(3)]
    handles = [hvd.broadcast_async(each, last, f"new {n}") for n, each in enumerate(inputs)]
    found = [hvd.synchronize(handle).tolist() for handle in handles]
    assert found == [[last + each] * 2 for each in range(3)]
    assert [each.tolist() for each in inputs] == [[rank + each] * 2 for each in range(3)]


def trained(make: Any, rank: int, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer as rank has them after some steps, with an option of its own."""
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    model[0].bias.requires_grad_(False)  # frozen: it has no state
    optimizer = make(model.parameters())
    optimizer.param_groups[0]["lr"] = 0.1 * (rank + 1)
    for _ in range(steps):
        step(model, optimizer)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.linspace(-1, 1, 12).view(4, 3)).square().sum().backward()
    optimizer.step()


def same_state(name: str, found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["param_groups"] == expected["param_groups"], name
    assert [type(value) for value in found["param_groups"][0].values()] == [
        type(value) for value in expected["param_groups"][0].values()
    ]
    assert set(found["state"]) == set(expected["state"]), name
    for key, entry in expected["state"].items():
        assert set(found["state"][key]) == set(entry), name
        for each, value in entry.items():
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(found["state"][key][each], value, rtol=0, atol=0)
            else:
                assert found["state"][key][each] == value, (name, each)
