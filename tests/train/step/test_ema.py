"""The EMA of the weights, against torch's AveragedModel and slow numpy; equal on all ranks."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import allstep
from allstep.errors import CheckpointError
from allstep.train.health.replicas import hash_of
from allstep.train.step.ema import Average
from support.ranks import Ranks


def small_model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 2))


def train(model: nn.Sequential, step: int) -> None:
    """Change all weights and statistics deterministically."""
    generator = torch.Generator().manual_seed(step)
    model.train()(torch.randn(8, 1, 4, 4, generator=generator)).square().mean().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad + 0.01 * torch.randn(
                parameter.shape, generator=generator
            )
    model.zero_grad()


def decay_at(update: int, decay: float, every: int) -> float:
    return min(decay, (1 + update) / (10 + update)) ** every


@pytest.mark.parametrize(("decay", "every"), [(0.9, 1), (0.99, 5), (0.3, 3)])
def test_like_torchs_own(decay: float, every: int) -> None:
    model = small_model()
    average = Average(model, decay, every)
    updates = 0

    def blend(ours: Any, theirs: Any, _: Any) -> None:
        if ours[0].is_floating_point():
            torch._foreach_lerp_(ours, theirs, 1 - decay_at(updates, decay, every))

    reference = AveragedModel(model, multi_avg_fn=blend, use_buffers=True)
    reference.n_averaged += 1  # torch would take the first weights it sees as they are
    for updates in range(1, 41):
        train(model, updates)
        average.update()
        if updates % every == 0:
            reference.update_parameters(model)
    assert average.updates == 40
    for (name, ours), theirs in zip(
        average.model.state_dict().items(), reference.module.state_dict().values(), strict=True
    ):
        if ours.is_floating_point():
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
        else:
            assert ours == 40 // every * every, name


def test_like_slow_numpy() -> None:
    model = nn.Linear(3, 2).double()
    average = Average(model, 0.97, 2)
    expected = model.weight.detach().numpy().copy()
    for update in range(1, 61):
        with torch.no_grad():
            model.weight += torch.randn(2, 3, generator=torch.Generator().manual_seed(update))
        average.update()
        if update % 2 == 0:
            d = decay_at(update, 0.97, 2)
            expected = d * expected + (1 - d) * model.weight.detach().numpy()
    np.testing.assert_allclose(average.model.weight.numpy(), expected, rtol=1e-12)


def test_a_look_every_few_updates_is_nearly_one_at_each() -> None:
    models = [nn.Linear(4, 4) for _ in range(2)]
    averages = [Average(model, 0.99, every) for model, every in zip(models, (1, 5), strict=True)]
    for update in range(1, 1001):
        for model, average in zip(models, averages, strict=True):
            nn.init.constant_(model.weight, update / 1000)
            average.update()
    each, few = (average.model.weight[0, 0].item() for average in averages)
    assert each == pytest.approx(0.901, abs=0.005)  # 99 updates behind, or fewer while it is young
    assert few == pytest.approx(each, abs=0.003)


def test_the_copy_is_apart() -> None:
    model = small_model().to(memory_format=torch.channels_last)
    average = Average(model, 0.9)
    assert not average.model.training
    assert model.training
    assert not any(parameter.requires_grad for parameter in average.model.parameters())
    ours = {tensor.data_ptr() for tensor in average.tensors().values()}
    assert ours.isdisjoint(tensor.data_ptr() for tensor in model.state_dict().values())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    average.update()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert average.model[0].weight.stride() == model[0].weight.stride()


def test_it_resumes_from_a_checkpoint_to_the_same_bits() -> None:
    whole_model, model = small_model(), small_model()
    whole = Average(whole_model, 0.95, 3)
    first = Average(model, 0.95, 3)
    for update in range(1, 11):  # 10 is between two looks
        train(whole_model, update), train(model, update)
        whole.update(), first.update()
    second = Average(model, 0.95, 3)
    second.load({name: tensor.clone() for name, tensor in first.tensors().items()}, first.updates)
    for update in range(11, 21):
        train(whole_model, update), train(model, update)
        whole.update(), second.update()
    assert all(
        torch.equal(tensor, second.tensors()[name]) for name, tensor in whole.tensors().items()
    )


def test_the_average_of_another_net_is_refused() -> None:
    average = Average(small_model(), 0.9)
    with pytest.raises(
        CheckpointError, match=r"9 tensors are missing and 2 are unknown; the first is '0\.bias'"
    ):
        average.load(dict(nn.Linear(2, 2).named_parameters()), 1)
    tensors = average.tensors()
    with pytest.raises(CheckpointError, match=r"'3\.bias' is \(5,\), expected \(2,\)"):
        average.load({**tensors, "3.bias": torch.zeros(5)}, 1)


def hashes() -> list[int]:
    world = allstep.init()
    torch.set_num_threads(1 + world.rank)  # a rank may have more cores than another
    model = small_model()
    average = Average(model, 0.9, 2)
    for update in range(1, 8):
        torch.set_num_threads(1)
        train(model, update)
        torch.set_num_threads(1 + world.rank)
        average.update()
    return [hash_of(tensor).item() for tensor in average.tensors().values()]


def test_the_same_bits_on_all_ranks(ranks: Ranks) -> None:
    first, second = ranks(2, hashes)
    assert first == second
