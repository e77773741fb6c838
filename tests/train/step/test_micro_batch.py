"""The room for larger micro-batches: bytes of a sample by hand, and models without room."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from allstep.train.step.micro_batch import bytes_of_sample, memory_of_worker, samples_at_once
from allstep.world import World


def forward(model: nn.Module, count: int) -> Tensor:
    output: Tensor = model(torch.zeros(count, 3, 8, 8))
    return output


def convolution() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(256, 10))


def test_bytes_of_a_sample_are_what_each_layer_keeps() -> None:
    """The convolution keeps its input (3x8x8), the ReLU its output (4x8x8), which the linear layer
    keeps as well; 4 bytes each."""
    assert bytes_of_sample(convolution(), forward) == 4 * (3 * 64 + 4 * 64)
    wide = nn.Sequential(nn.Flatten(), nn.Linear(192, 5), nn.Sigmoid(), nn.Linear(5, 2))
    assert bytes_of_sample(wide, forward) == 4 * (192 + 5)
    assert bytes_of_sample(
        wide.double(), lambda model, count: model(torch.zeros(count, 192).double())
    ) == 8 * (192 + 5)


def test_a_quarter_of_the_memory_is_for_a_micro_batch_and_its_gradients() -> None:
    assert samples_at_once(convolution(), forward, 4 * 2 * 1792 * 50) == 50


@pytest.mark.parametrize("norm", [nn.BatchNorm2d(3), nn.SyncBatchNorm(3)])
def test_a_batch_norm_gets_no_room(norm: nn.Module) -> None:
    """Its statistics would be over more samples."""
    assert samples_at_once(nn.Sequential(norm, convolution()), forward, 10**12) == 0


class Odd(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError(f"takes one sample, not {len(x)}")


def test_a_model_that_cannot_be_measured_gets_no_room() -> None:
    assert samples_at_once(Odd(), forward, 10**12) == 0
    assert samples_at_once(nn.Identity(), forward, 10**12) == 0


class Counting(nn.Module):
    """A model that has state and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))
        self.inner = convolution()

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        output: Tensor = self.inner(nn.functional.dropout(x))
        return output


def test_the_model_and_the_draws_do_not_change() -> None:
    model = Counting()
    torch.manual_seed(1)
    before = torch.get_rng_state()
    assert samples_at_once(model, forward, 10**9) > 0
    assert torch.equal(torch.get_rng_state(), before)
    assert model.calls == 0


def test_workers_of_a_host_share_its_memory() -> None:
    """It depends on the total memory, not on the memory that is free at the moment."""
    cpu, alone = torch.device("cpu"), World.alone()
    whole = memory_of_worker(alone, cpu)
    assert whole == memory_of_worker(alone, cpu) > 10**8
    assert memory_of_worker(replace(alone, size=8, local_size=4), cpu) == whole // 4
