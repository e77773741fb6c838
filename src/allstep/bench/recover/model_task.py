"""The models whose state is sent to a worker that joins: ResNet-18 (90 MB with momentum), AlexNet
(490 MB), and the small CNN (6 MB) for trying the bench out.

The batch has one or two images, since only the size of the state matters here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from allstep.models import AlexNet, SmallCnn, resnet18


@dataclass(frozen=True)
class _Task:
    """A model, and the shape of a batch of its images with the number of classes."""

    make: Callable[[], nn.Module]
    shape: tuple[int, int, int, int]
    num_classes: int


_TASKS: Mapping[str, _Task] = {
    # Two images, since batch norm needs more than one value for each channel.
    "resnet18": _Task(lambda: resnet18(10, small_pictures=True), (2, 3, 32, 32), 10),
    "alexnet": _Task(lambda: AlexNet(1000), (1, 3, 224, 224), 1000),
    "small-cnn": _Task(
        lambda: SmallCnn(10, (1, 28, 28), widths=(32, 64), hidden=250), (2, 1, 28, 28), 10
    ),
}


def model_task(name: str) -> tuple[nn.Module, torch.optim.Optimizer, Tensor, Tensor]:
    """Return a model, SGD with momentum, and a batch of images with labels."""
    task = _TASKS[name]
    torch.manual_seed(0)
    model = task.make()
    sgd = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    labels = torch.randint(task.num_classes, task.shape[:1])
    return model, sgd, torch.randn(task.shape), labels


def fill_momentum(model: nn.Module, sgd: torch.optim.Optimizer) -> list[Tensor]:
    """Let the optimizer make its state by one step; return all tensors of model and optimizer."""
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    sgd.step()
    sgd.zero_grad()
    momentum = [each["momentum_buffer"] for each in sgd.state.values()]
    return [*model.state_dict().values(), *momentum]
