"""Train a small model to classify points on the three arms of a spiral: ordinary PyTorch."""

import allstep
import torch
from torch import nn


def spirals(points_per_arm):
    """Return points (x, y) on three arms, and the number of each point's arm."""
    radius = torch.rand(3, points_per_arm)
    noise = 0.1 * torch.randn(3, points_per_arm)
    angle = 4 * radius + 2 * torch.pi / 3 * torch.arange(3).unsqueeze(1) + noise
    points = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=-1)
    return points.reshape(-1, 2), torch.arange(3).repeat_interleave(points_per_arm)


def main():
    print(world := allstep.init())  # join the other workers: World(rank=0, size=2, ...)
    torch.manual_seed(0)
    points, arms = spirals(points_per_arm=1024)
    model = nn.Sequential(
        nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3)
    )
    model = nn.parallel.DistributedDataParallel(model)  # average the gradients over the workers
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loss_of = nn.CrossEntropyLoss()

    for _ in range(10):
        for batch in torch.randperm(len(points)).split(64):
            batch = batch[world.rank :: world.size]  # this worker's share
            loss = loss_of(model(points[batch]), arms[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    with torch.no_grad():
        answers = model(points)
    accuracy = (answers.argmax(dim=1) == arms).float().mean()
    print(f"loss {loss_of(answers, arms):.4f}, accuracy {accuracy:.1%}")


if __name__ == "__main__":
    main()
