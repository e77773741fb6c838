"""The opening event: operations compared with a count by hand, and a model that is not changed."""

import pytest
import torch
from torch import nn

from allstep.train.run.start import count_flop


def model() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 6 * 6, 10)
    )


def test_operations_are_those_of_three_products() -> None:
    """Forward, gradient by the weights, and by the input except for the first layer's input."""
    convolution, linear = 2 * 36 * 4 * 9, 2 * 144 * 10
    assert count_flop(model(), torch.zeros(1, 1, 8, 8)) == 2 * convolution + 3 * linear


def test_a_part_that_is_frozen_stays_so() -> None:
    made = model().train()
    made[1].eval()
    before = {name: tensor.clone() for name, tensor in made.state_dict().items()}
    count_flop(made, torch.ones(1, 1, 8, 8))
    assert [module.training for module in made] == [True, False, True, True]
    assert all(torch.equal(tensor, before[name]) for name, tensor in made.state_dict().items())
    assert all(parameter.grad is None for parameter in made.parameters())


def test_a_net_that_fails_is_left_as_it_was_too() -> None:
    made = model().train()
    with pytest.raises(RuntimeError):
        count_flop(made, torch.ones(1, 3, 8, 8))
    assert all(module.training for module in made.modules())
