"""Parameters in flat memory and their units; the optimizer's state cut to units and back."""

from typing import Any

import pytest
import torch
from torch import nn

from allstep.errors import UserError
from allstep.kvstore.training.layout import Layout
from allstep.kvstore.training.model_copy import ModelCopy
from allstep.kvstore.training.unit_updates import StatePlan, private_memory
from allstep.kvstore.training.whole_state import put_state, whole_state
from support.parties import OPTIMIZERS, Small, named

pytestmark = pytest.mark.unit


def layout_of(model: nn.Module, is_whole: bool) -> Layout:
    return Layout([list(model.parameters())], named(model), is_whole)


@pytest.mark.parametrize("is_whole", [False, True])
def test_units_cover_each_element_once(is_whole: bool) -> None:
    model = nn.Sequential(nn.Linear(600, 1200), nn.Linear(3, 5), nn.Linear(600, 300))
    layout = layout_of(model, is_whole)
    (flat,) = layout.flats
    counts = [torch.zeros(each.numel()) for each in model.parameters()]
    for unit in layout.units:
        for chunk in unit.chunks:
            assert unit.start <= chunk.start < chunk.end <= unit.end
            counts[chunk.number][chunk.at : chunk.at + chunk.end - chunk.start] += 1
            assert chunk.start - chunk.at == flat.starts[chunk.number]
    assert all((count == 1).all() for count in counts)
    assert [unit.start for unit in layout.units[1:]] == [unit.end for unit in layout.units[:-1]]
    if is_whole:
        starts = set(flat.starts.values())
        assert all(unit.start in starts for unit in layout.units)
        # The large parameter is a unit; all others share one.
        assert len(layout.units) == 2
    else:
        assert max(unit.end - unit.start for unit in layout.units) == 1 << 18


def test_groups_and_types_have_flats_of_their_own() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2).double())
    first, *others = model.parameters()
    layout = Layout([[first], others], named(model), is_whole=False)
    assert [(flat.group, flat.dtype) for flat in layout.flats] == [
        (0, torch.float32),
        (1, torch.float32),
        (1, torch.float64),
    ]


@pytest.mark.parametrize("name", [*OPTIMIZERS])
def test_units_update_as_the_optimizer_and_keep_its_state(name: str) -> None:
    """Three steps by units from a state of torch's equal torch's own, bit by bit or nearly."""
    model, copied = (Small(700, has_rare=False) for _ in range(2))
    copied.load_state_dict(model.state_dict())
    # A layout that is not that of the shape.
    for each in (model, copied):
        each.second.weight.data = each.second.weight.data.t().contiguous().t()
    plain, outer = OPTIMIZERS[name](model.parameters()), OPTIMIZERS[name](copied.parameters())

    def set_gradients(turn: int) -> None:
        draws = torch.Generator().manual_seed(turn)
        for ours, theirs in zip(model.parameters(), copied.parameters(), strict=True):
            ours.grad = torch.randn(ours.shape, generator=draws)
            theirs.grad = ours.grad.clone()

    set_gradients(0)
    plain.step()
    outer.step()
    wrapped: Any = type(outer)
    layout = layout_of(copied, is_whole=name == "lars")
    plan = StatePlan(outer, wrapped, layout)
    assert len(layout.units) >= 2
    copy = ModelCopy(
        outer, wrapped, plan, private_memory(layout.nbytes), private_memory(plan.nbytes)
    )
    copy.put()
    updates = copy.updates
    put_state(layout, updates.has_state, updates.states, outer.state)
    for turn in (1, 2, 3):
        set_gradients(turn)
        plain.step()
        copy.take_gradients()
        copy.use_groups(outer.param_groups, [group["lr"] for group in outer.param_groups])
        for index in range(len(layout.units)):
            copy.apply(index, 0.0)
            copy.pull(index)
    for ours, theirs in zip(model.parameters(), copied.parameters(), strict=True):
        torch.testing.assert_close(theirs, ours, rtol=1e-6, atol=1e-7)
    found = whole_state(layout, updates.has_state, updates.states)
    for number, each in enumerate(model.parameters()):
        assert found.get(number, {}).keys() == {
            key for key, value in plain.state[each].items() if value is not None
        }
        for key, value in found.get(number, {}).items():
            torch.testing.assert_close(value, plain.state[each][key], rtol=1e-6, atol=1e-7)


def test_parameters_that_cannot_be_shared() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(UserError, match="no parameter needs a gradient"):
        Layout([[]], [], is_whole=False)
    meta = nn.Linear(2, 2, device="meta")
    with pytest.raises(UserError, match=r"'weight' is on meta.*train on the CPU"):
        layout_of(meta, is_whole=False)
    model.bias = nn.Parameter(torch.zeros(2, dtype=torch.int32), requires_grad=False)
    with pytest.raises(UserError, match=r"'bias' is torch\.int32"):
        layout_of(model, is_whole=False)
