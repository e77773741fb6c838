"""Train a small convolutional model with PyTorch on several workers, in Horovod's style.

allstep run --as-horovod -np 2 python examples/horovod_torch.py
"""

import horovod.torch as hvd
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def images(count, seed):
    """Return images of ten classes, each class a pattern of its own with noise, and the classes."""
    patterns = torch.rand(10, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    random = torch.Generator().manual_seed(seed)
    classes = torch.randint(10, (count,), generator=random)
    return patterns[classes] + torch.randn(count, 1, 28, 28, generator=random), classes


def build_model():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * 13 * 13, 10),
    )


def main():
    hvd.init()
    dataset = TensorDataset(*images(2048, seed=1))
    sampler = DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())
    data = DataLoader(dataset, batch_size=32, sampler=sampler)

    model = build_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001 * hvd.size())
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(
        model.state_dict(), root_rank=0
    )  # all workers start with equal weights
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    loss_of = nn.CrossEntropyLoss()

    for epoch in range(3):
        sampler.set_epoch(epoch)
        for batch, classes in data:
            optimizer.zero_grad()
            loss_of(model(batch), classes).backward()
            optimizer.step()  # with the mean of the workers' gradients

    if hvd.rank() == 0:
        batch, classes = images(1024, seed=2)
        with torch.no_grad():
            logits = model(batch)
        accuracy = (logits.argmax(dim=1) == classes).float().mean()
        loss = loss_of(logits, classes)
        print(f"torch on {hvd.size()} workers: loss {loss:.4f}, accuracy {accuracy:.1%}")


if __name__ == "__main__":
    main()
