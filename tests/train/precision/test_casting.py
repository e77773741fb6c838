"""Casts of a model, compared with torch's for real numbers; complex numbers stay complex."""

import copy

import pytest
import torch
from torch import nn

from allstep.train.precision.casting import cast

CPU = torch.device("cpu")


class Filter(nn.Module):
    """A model with a convolution and a product in the frequency domain."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
        self.response = nn.Parameter(torch.randn(4, 3, dtype=torch.complex64))
        self.register_buffer("phase", torch.tensor([1j, 2 + 3j]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_is_what_torch_does_to_real_numbers(dtype: torch.dtype) -> None:
    model = Filter().inner
    ours, theirs = cast(copy.deepcopy(model), CPU, dtype), copy.deepcopy(model).to(CPU, dtype)
    for (name, tensor), other in zip(
        ours.state_dict().items(), theirs.state_dict().values(), strict=True
    ):
        assert tensor.dtype == other.dtype, name
        assert torch.equal(tensor, other), name


def test_complex_numbers_stay_complex() -> None:
    model = Filter()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for dtype, expected in ((torch.float64, torch.complex128), (torch.float32, torch.complex64)):
        cast(model, CPU, dtype)
        assert model.response.dtype == model.phase.dtype == expected
        assert isinstance(model.response, nn.Parameter)
        assert model.response.requires_grad
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
