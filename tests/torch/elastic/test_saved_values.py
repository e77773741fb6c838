"""Copies of state dicts in memory that is allocated once. The reference is `copy.deepcopy`."""

import copy
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from allstep.torch.elastic.saved_values import SavedValues
from allstep.torch.elastic.state import ModelStateHandler, OptimizerStateHandler


def places(saved: SavedValues) -> list[int]:
    return sorted({buffer.data_ptr() for buffer in saved._buffers.values()})


def same(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)


def train(model: nn.Module, optimizer: Any, steps: int = 1) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()


def model_of(tied: bool = False) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    if tied:
        model[2].weight = model[0].weight
    return model


MAKERS = {
    "momentum": lambda given: torch.optim.SGD(given, 0.1, momentum=0.9),
    "adam": lambda given: torch.optim.Adam(given, 0.1, amsgrad=True),
    "adafactor": lambda given: torch.optim.Adafactor(given, 0.1),
}


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("tied", [False, True])
def test_training_continues_from_the_last_save(maker: str, tied: bool) -> None:
    """Also twice from the same one, and from one without state, since the first step creates it."""
    model = model_of(tied)
    optimizer = MAKERS[maker](model.parameters())
    handlers = ModelStateHandler(model), OptimizerStateHandler(optimizer)
    for steps_before in (0, 3, 1):
        train(model, optimizer, steps_before)
        expected = copy.deepcopy((model, optimizer.state_dict()))
        for handler in handlers:
            handler.save()
        for _ in range(2):
            train(model, optimizer, 2)
            optimizer.param_groups[0]["lr"] = 7.0
            for handler in handlers:
                handler.restore()
            same(dict(model.state_dict()), dict(expected[0].state_dict()))
            same(optimizer.state_dict(), expected[1])
        other = copy.deepcopy(expected[0])
        reference = MAKERS[maker](other.parameters())
        reference.load_state_dict(copy.deepcopy(expected[1]))
        train(other, reference)
        train(model, optimizer)
        same(dict(model.state_dict()), dict(other.state_dict()))


def test_memory_is_allocated_once() -> None:
    model = model_of()
    optimizer = MAKERS["adam"](model.parameters())
    train(model, optimizer)
    handlers = ModelStateHandler(model), OptimizerStateHandler(optimizer)
    before = [places(handler._saved) for handler in handlers]
    live = [parameter.data_ptr() for parameter in model.parameters()]
    state = {id(value) for entry in optimizer.state.values() for value in entry.values()}
    for _ in range(3):
        train(model, optimizer)
        for handler in handlers:
            handler.save()
        train(model, optimizer)
        for handler in handlers:
            handler.restore()
    assert [places(handler._saved) for handler in handlers] == before
    # Restored in place: what refers to a tensor stays right.
    assert [parameter.data_ptr() for parameter in model.parameters()] == live
    assert {id(value) for entry in optimizer.state.values() for value in entry.values()} == state


def test_tied_weights_are_saved_once() -> None:
    handler = ModelStateHandler(model_of(tied=True))
    assert len(places(handler._saved)) == len(model_of().state_dict()) - 1


def odd_values() -> dict[str, Any]:
    base = torch.arange(12.0)
    return {
        "view": base[:6],
        "overlapping view": base[4:8],
        "transposed": base.view(3, 4).t(),
        "expanded": torch.ones(1, 3).expand(4, 3),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(5),
        "flags": torch.tensor([True, False]),
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "sparse": torch.eye(3).to_sparse(),
        "leaf": torch.ones(2, requires_grad=True),
        "parameter": nn.Parameter(torch.ones(2)),
        "nested": [{"a": (torch.ones(2), 3), 4: [torch.zeros(1)]}],
        "text": "x",
        "none": None,
        "list": [1, [2]],
    }


def test_odd_values() -> None:
    values, saved = odd_values(), SavedValues()
    saved.save(values)
    expected = odd_values()
    with torch.no_grad():
        values["view"].add_(1)
        values["transposed"].mul_(2)
        values["scalar"].add_(1)
        values["nested"][0]["a"][0].fill_(9)
        values["list"][1].append(3)
        values["leaf"].fill_(3)
    result = saved.restored(values)
    assert result.keys() == expected.keys()
    for name, value in expected.items():
        assert type(result[name]) is type(value), name
        same_value(result[name], value)
    assert result["scalar"] is values["scalar"]
    assert result["leaf"].requires_grad and result["leaf"] is not values["leaf"]


def same_value(one: Any, other: Any) -> None:
    if isinstance(other, Tensor) and other.layout != torch.strided:
        same(one.to_dense(), other.to_dense())
    elif isinstance(other, Tensor):
        same(one, other)
    elif isinstance(other, list | tuple):
        for first, second in zip(one, other, strict=True):
            same_value(first, second)
    elif isinstance(other, dict):
        assert one.keys() == other.keys()
        for key in other:
            same_value(one[key], other[key])
    else:
        assert one == other


def test_shapes_dtypes_and_names_may_change() -> None:
    saved = SavedValues()
    for values in (
        {"a": torch.ones(3), "b": torch.ones(2)},
        {"a": torch.ones(4), "b": torch.ones(2).double()},
        {"b": torch.ones(2).double(), "c": torch.ones(1)},
    ):
        expected = copy.deepcopy(values)
        saved.save(values)
        for value in values.values():
            value.zero_()
        same(saved.restored({}), expected)
        same(saved.restored(values), expected)
        same(values, expected)
        assert saved._buffers.keys() == {(name,) for name in values}


def test_versions_of_a_state_dict_are_kept() -> None:
    saved = SavedValues()
    given = model_of().state_dict()
    saved.save(given)
    result = saved.restored(given)
    assert type(result) is OrderedDict and result._metadata == given._metadata
