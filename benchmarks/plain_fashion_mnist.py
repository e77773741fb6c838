"""Train Fashion-MNIST in plain PyTorch; `benchmarks/train.py` compares it with `allstep train`.

    torchrun --nproc-per-node 2 benchmarks/plain_fashion_mnist.py CONFIG

No code of allstep trains here. The script uses DistributedDataParallel on Gloo and a DataLoader
with DistributedSampler, as in PyTorch's tutorials, with the model, batch, learning rate and split
of the config, channels-last if requested, and one thread per worker. It evaluates on the held-out
samples four times per epoch, outside the measured time, and prints a line of JSON each time.
"""

import json
import math
import os
import sys
import time

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from allstep.models import SmallCnn


def main() -> None:
    settings = json.loads(sys.argv[1])
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(settings["seed"])
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    arrays = np.load(settings["arrays"])
    train, validation = (_dataset(arrays, part, settings) for part in ("train", "validation"))
    sampler = DistributedSampler(train, size, rank, shuffle=True, seed=settings["seed"])
    loader = DataLoader(
        train,
        batch_size=settings["batch"] // size,
        sampler=sampler,
        num_workers=settings["num_workers"],
    )
    plain = SmallCnn(10, (1, 28, 28), widths=settings["widths"], hidden=settings["hidden"])
    if settings["channels_last"]:
        plain = plain.to(memory_format=torch.channels_last)
    model = DistributedDataParallel(plain)
    optimizer = torch.optim.SGD(
        model.parameters(),
        settings["lr"],
        momentum=0.9,
        nesterov=True,
        weight_decay=settings["weight_decay"],
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: _factor(step, len(loader), settings)
    )
    spent, samples = 0.0, 0
    quarters = {round(len(loader) * part / 4) for part in (1, 2, 3, 4)}
    for epoch in range(settings["epochs"]):
        sampler.set_epoch(epoch)
        started = time.perf_counter()
        for step, (images, labels) in enumerate(loader, 1):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
            schedule.step()
            samples += size * len(labels)
            if step in quarters:
                spent += time.perf_counter() - started
                accuracy = _accuracy(plain, validation, rank, size)
                if rank == 0:
                    line = {
                        "epoch": epoch + 1,
                        "samples": samples,
                        "seconds": spent,
                        "accuracy": accuracy,
                    }
                    print(json.dumps(line), flush=True)
                if accuracy >= settings["goal"]:
                    dist.destroy_process_group()
                    return
                started = time.perf_counter()
    dist.destroy_process_group()


def _dataset(
    arrays: "np.lib.npyio.NpzFile", split: str, settings: dict[str, float]
) -> TensorDataset:
    images = (
        torch.from_numpy(arrays[f"{split}_images"])
        .float()
        .sub_(settings["mean"])
        .div_(settings["std"])
    )
    return TensorDataset(images.unsqueeze(1), torch.from_numpy(arrays[f"{split}_labels"]))


def _factor(step: int, steps_per_epoch: int, settings: dict[str, float]) -> float:
    """Return the factor of the learning rate: a linear warm-up, then half a cosine."""
    warmup, total = (
        settings["warmup"] * steps_per_epoch,
        settings["schedule_epochs"] * steps_per_epoch,
    )
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / (total - warmup)))


@torch.no_grad()
def _accuracy(model: nn.Module, validation: TensorDataset, rank: int, size: int) -> float:
    model.eval()
    images, labels = validation.tensors[0][rank::size], validation.tensors[1][rank::size]
    correct = sum(
        (model(some).argmax(1) == which).sum()
        for some, which in zip(images.split(500), labels.split(500), strict=True)
    )
    total = torch.tensor([float(correct)])
    dist.all_reduce(total)
    model.train()
    return total.item() / len(validation)


if __name__ == "__main__":
    main()
