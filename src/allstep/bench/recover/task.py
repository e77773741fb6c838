"""What the workers of `allstep bench recover` train: a small CNN on one batch.

Imports no more than torch and the model, because a restart under torchrun pays for every import.
"""

import torch
from torch import Tensor, nn

from allstep.models import SmallCnn

BATCH = 32


def small_cnn() -> tuple[nn.Module, torch.optim.Optimizer, Tensor, Tensor]:
    """Return the model, its optimizer, and a batch of images with labels."""
    torch.manual_seed(0)
    model = SmallCnn(10, (1, 28, 28), widths=(32, 64), hidden=250)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return model, optimizer, torch.randn(BATCH, 1, 28, 28), torch.randint(10, (BATCH,))


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, labels: Tensor
) -> None:
    """Run one training step."""
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(images), labels)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
