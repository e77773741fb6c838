"""Directions and weights of points: against their definition, and against closed forms."""

import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from allstep.data import Batch
from allstep.models import LeNet
from allstep.models.norms import batch_norm
from allstep.study.landscape.directions import direction, filter_dimensions, normals
from allstep.study.landscape.points import Point, points
from allstep.study.landscape.survey import Loss
from allstep.study.landscape.weights import Weights, differences, digest
from allstep.train.task.classification import Classification, ClassificationTally


def lenet(seed: int = 0, norm: bool = False) -> LeNet:
    torch.manual_seed(seed)
    how = {"norm": batch_norm()} if norm else {}
    return LeNet(4, (1, 8, 8), widths=(3, 5), hidden=7, **how).eval()


def batches(count: int = 12, seed: int = 3) -> list[Batch]:
    torch.manual_seed(seed)
    images, target = torch.randn(count, 1, 8, 8), torch.randint(4, (count,))
    numbers = np.arange(count)
    return [
        Batch(images[at : at + 5], target[at : at + 5], numbers[at : at + 5], 5, 0, at)
        for at in range(0, count, 5)
    ]


def loss_of(model: nn.Module, second: nn.Module | None = None) -> Loss:
    return Loss(Weights(model, second, 0), batches(), lambda data: data, Classification(4), False)


def test_each_filter_has_the_norm_of_the_model_and_the_rest_is_zero() -> None:
    model = lenet(norm=True)
    dimensions = filter_dimensions(model)
    assert set(dimensions) == {
        "features.0.weight",
        "features.4.weight",
        "head.1.weight",
        "head.4.weight",
    }
    weights = dict(model.named_parameters())
    for name, step in direction(weights, dimensions, 7, 2).items():
        assert step.dtype == weights[name].dtype and step.stride() == weights[name].stride()
        norms = step.flatten(1).norm(dim=1)
        torch.testing.assert_close(norms, weights[name].flatten(1).norm(dim=1), rtol=1e-5, atol=0)


def test_frozen_tensors_stay_and_transposed_filters_are_found() -> None:
    model = nn.Sequential(nn.ConvTranspose2d(3, 5, 2), nn.Linear(4, 4))
    model[1].weight.requires_grad_(False)
    assert filter_dimensions(model) == {"0.weight": 1}
    weight = model[0].weight
    step = direction({"0.weight": weight}, {"0.weight": 1}, 0, 0)["0.weight"]
    norms = step.transpose(0, 1).flatten(1).norm(dim=1)
    torch.testing.assert_close(norms, weight.transpose(0, 1).flatten(1).norm(dim=1))


def test_numbers_of_a_filter_depend_on_seed_tensor_and_filter_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = normals(5, "landscape 0 a", np.arange(6), 9)
    assert np.array_equal(normals(5, "landscape 0 a", np.array([4, 1]), 9), whole[[4, 1]])
    for seed, stream in ((6, "landscape 0 a"), (5, "landscape 1 a"), (5, "landscape 0 b")):
        assert not np.isclose(normals(seed, stream, np.arange(6), 9), whole).any()
    weights = {"a": torch.randn(40, 30)}
    at_once = direction(weights, {"a": 0}, 5, 0)["a"]
    monkeypatch.setattr("allstep.study.landscape.directions._AT_ONCE", 64)
    assert torch.equal(direction(weights, {"a": 0}, 5, 0)["a"], at_once)


def test_the_numbers_are_normal() -> None:
    drawn = normals(0, "landscape 0 a", np.arange(200), 501)
    assert abs(drawn.mean()) < 0.01 and abs(drawn.std() - 1) < 0.01
    inside = [(np.abs(drawn) < bound).mean() for bound in (0.5, 1, 2, 3)]
    assert inside == pytest.approx([0.3829, 0.6827, 0.9545, 0.9973], abs=0.006)
    pairs = np.corrcoef(drawn[:, :250].ravel(), drawn[:, 251:].ravel())
    assert abs(pairs[0, 1]) < 0.02


def test_a_filter_of_zeros_does_not_move() -> None:
    step = direction({"a": torch.zeros(3, 4)}, {"a": 0}, 0, 0)["a"]
    assert torch.equal(step, torch.zeros(3, 4))


# The loss at points


def test_the_center_and_both_ends_of_the_line_have_the_bits_of_the_runs() -> None:
    first, second = lenet(0, norm=True), lenet(1, norm=True)
    for layer in second.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.running_var.fill_(3.0)
            layer.num_batches_tracked.fill_(9)
    wanted = [{k: v.clone() for k, v in each.state_dict().items()} for each in (first, second)]
    weights = Weights(first, second, 0)
    weights.place(Point("plane 0 0", "first", ((0, 0.5), (1, -1.0))))
    weights.place(Point("center", "first"))
    assert all(torch.equal(v, wanted[0][k]) for k, v in first.state_dict().items())
    weights.place(Point("second", "second"))
    assert all(torch.equal(v, wanted[1][k]) for k, v in first.state_dict().items())
    weights.place(Point("line 1", "line", part=0.25))
    found = first.state_dict()
    for name, mine in wanted[0].items():
        between = torch.lerp(mine, wanted[1][name], 0.25) if mine.is_floating_point() else mine
        assert torch.equal(found[name], between), name
    assert found["features.1.running_var"].tolist() == [1.5] * 3, "interpolated too"


def test_steps_are_added_in_norms_of_the_filters() -> None:
    model = lenet()
    before = {name: each.clone() for name, each in model.named_parameters()}
    weights = Weights(model, None, 3)
    dimensions = filter_dimensions(model)
    one, two = (direction(before, dimensions, 3, number) for number in (0, 4))
    weights.place(Point("p", "first", ((0, 0.5), (4, -1.0))))
    for name, tensor in model.named_parameters():
        step = 0.5 * one[name] - two[name] if name in dimensions else 0
        torch.testing.assert_close(tensor.detach(), before[name] + step)


def test_a_layer_times_8_and_the_next_divided_by_8_change_no_point() -> None:
    """Powers of two, so that even the rounding is the same."""
    plain, scaled = lenet(), lenet()
    with torch.no_grad():
        scaled.features[0].weight *= 8
        scaled.features[0].bias *= 8
        scaled.features[4].weight /= 8
    mine, theirs = loss_of(plain), loss_of(scaled)
    listed = list(points("around", (5, 5)))
    assert [mine(each) for each in listed] == [theirs(each) for each in listed]
    # Half a norm along the first two directions is on the grid, too.
    assert len({mine(each).loss for each in listed}) == len(listed) - 2


class Squares(Classification):
    """A task whose loss is quadratic in the weights of a linear model."""

    def loss_sum(self, outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        wanted = nn.functional.one_hot(target, outputs.shape[1]).to(outputs.dtype)
        return ((outputs - wanted) ** 2).sum()

    def tally(self) -> ClassificationTally:
        return ClassificationTally()


@settings(max_examples=20)
@given(st.integers(0, 1000))
def test_a_quadratic_loss_has_its_closed_form(seed: int) -> None:
    """L(w + a d1 + b d2) = L + a g1 + b g2 + a^2 h11 + b^2 h22 + 2 a b h12."""
    torch.manual_seed(seed)
    model = nn.Linear(6, 4, bias=False).double()
    images, target = torch.randn(20, 6, dtype=torch.float64), torch.randint(4, (20,))
    batch = Batch(images, target, np.arange(20), 20, 0, 0)
    loss = Loss(Weights(model, None, seed), [batch], lambda data: data, Squares(4), False)
    start = model.weight.detach().clone()
    d1, d2 = (
        direction({"weight": start}, {"weight": 0}, seed, number)["weight"] for number in (0, 1)
    )
    rest = images @ start.T - nn.functional.one_hot(target, 4)
    y1, y2 = images @ d1.T, images @ d2.T

    def mean(product: torch.Tensor) -> float:
        return float(product.sum()) / 20

    def closed(a: float, b: float) -> float:
        return (
            mean(rest * rest)
            + 2 * (a * mean(rest * y1) + b * mean(rest * y2))
            + (a * a * mean(y1 * y1) + b * b * mean(y2 * y2) + 2 * a * b * mean(y1 * y2))
        )

    for point in points("around", (4, 3)):
        if point.name.startswith("plane"):
            (_, a), (_, b) = point.steps
            assert loss(point).loss == pytest.approx(closed(a, b), rel=1e-9)
    assert loss(Point("flat 1", "first", ((1, 0.5),))).loss == pytest.approx(closed(0, 0.5))


def test_a_loss_that_is_not_finite_is_none() -> None:
    model = lenet()
    with torch.no_grad():
        model.head[4].bias[0] = float("nan")
    assert loss_of(model)(Point("center", "first")).loss is None


# Two models


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (
            lambda: LeNet(4, (1, 8, 8), widths=(3, 6), hidden=7),
            r"features\.4\.weight is \[5, 3, 5, 5\] in the first and \[6, 3, 5, 5\]",
        ),
        (lambda: lenet(norm=True), r"features\.1\.weight is only in the second"),
    ],
)
def test_tensors_that_differ_are_named(other: Callable[[], nn.Module], text: str) -> None:
    found = differences(lenet().state_dict(), other().state_dict())
    assert any(re.search(text, each) for each in found)
    assert differences(lenet().state_dict(), lenet(1).state_dict()) == []


def test_a_digest_depends_on_names_types_shapes_and_values() -> None:
    values = torch.arange(6.0)
    made = {
        digest({"a": values}),
        digest({"b": values}),
        digest({"a": values.double()}),
        digest({"a": values.view(2, 3)}),
        digest({"a": values.bfloat16()}),
        digest({"a": -values}),
    }
    assert len(made) == 6
    rows = torch.arange(24.0).view(1, 4, 3, 2)
    assert digest({"a": rows}) == digest({"a": rows.to(memory_format=torch.channels_last)})
