"""A residual model with gradual warm-up, local accumulation, metrics averaged over ranks, checkpoints
on rank 0 and resuming."""

import argparse
import math
from pathlib import Path

import horovod.torch as hvd
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--checkpoint-format", default="checkpoint-{epoch}.pth.tar")
parser.add_argument("--batches-per-allreduce", type=int, default=2)
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--base-lr", type=float, default=0.0125)
parser.add_argument("--warmup-epochs", type=float, default=2)
parser.add_argument("--wd", type=float, default=0.00005)
args = parser.parse_args()
allreduce_batch_size = args.batch_size * args.batches_per_allreduce


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x):
        return F.relu(x + self.norm(self.conv(x)))


class Metric:
    """The mean of a value over batches and ranks."""

    def __init__(self, name):
        self.name, self.sum, self.n = name, torch.tensor(0.0), torch.tensor(0.0)

    def update(self, value):
        self.sum += hvd.allreduce(value.detach().cpu(), name=self.name)
        self.n += 1

    @property
    def avg(self):
        return self.sum / self.n


def sample_images(number):
    """Bright in one of four corners."""
    generator = torch.Generator().manual_seed(7)
    target = torch.randint(4, (number,), generator=generator)
    data = torch.randn(number, 3, 16, 16, generator=generator)
    for index, corner in enumerate(target):
        row, column = 8 * (corner // 2), 8 * (corner % 2)
        data[index, :, row : row + 8, column : column + 8] += 0.7
    return TensorDataset(data, target)


def adjust_learning_rate(epoch, batch_idx):
    """From lr to lr * size over the first epochs, then down by steps."""
    if epoch < args.warmup_epochs:
        epoch += float(batch_idx + 1) / len(train_loader)
        lr_adj = 1.0 / hvd.size() * (epoch * (hvd.size() - 1) / args.warmup_epochs + 1)
    else:
        lr_adj = 1.0 if epoch < 30 else 1e-1
    for param_group in optimizer.param_groups:
        param_group["lr"] = args.base_lr * hvd.size() * args.batches_per_allreduce * lr_adj


def train(epoch):
    model.train()
    train_sampler.set_epoch(epoch)
    train_loss, train_accuracy = Metric("train_loss"), Metric("train_accuracy")
    for batch_idx, (data, target) in enumerate(train_loader):
        adjust_learning_rate(epoch, batch_idx)
        optimizer.zero_grad()
        for i in range(0, len(data), args.batch_size):
            data_batch, target_batch = (
                data[i : i + args.batch_size],
                target[i : i + args.batch_size],
            )
            output = model(data_batch)
            train_accuracy.update((output.argmax(1) == target_batch).float().mean())
            loss = F.cross_entropy(output, target_batch)
            train_loss.update(loss)
            loss.div_(math.ceil(float(len(data)) / args.batch_size))
            loss.backward()
        optimizer.step()
    if verbose:
        lr = optimizer.param_groups[0]["lr"]
        print(
            f"epoch {epoch}: loss {train_loss.avg:.4f} accuracy {100 * train_accuracy.avg:.1f} lr"
            f" {lr:.5f}"
        )


def save_checkpoint(epoch):
    if hvd.rank() == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, args.checkpoint_format.format(epoch=epoch + 1))


hvd.init()
torch.manual_seed(42)
torch.set_num_threads(1)
verbose = hvd.rank() == 0

resume_from_epoch = 0
for try_epoch in range(args.epochs, 0, -1):
    if Path(args.checkpoint_format.format(epoch=try_epoch)).exists():
        resume_from_epoch = try_epoch
        break
resume_from_epoch = hvd.broadcast(
    torch.tensor(resume_from_epoch), root_rank=0, name="resume_from_epoch"
).item()

train_dataset = sample_images(320)
train_sampler = DistributedSampler(train_dataset, num_replicas=hvd.size(), rank=hvd.rank())
train_loader = DataLoader(train_dataset, batch_size=allreduce_batch_size, sampler=train_sampler)

model = nn.Sequential(
    nn.Conv2d(3, 8, 3, padding=1),
    Block(8),
    nn.AvgPool2d(4),
    Block(8),
    nn.Flatten(),
    nn.Linear(128, 4),
)
optimizer = optim.SGD(
    model.parameters(),
    lr=args.base_lr * args.batches_per_allreduce * hvd.size(),
    momentum=0.9,
    weight_decay=args.wd,
)
optimizer = hvd.DistributedOptimizer(
    optimizer,
    named_parameters=model.named_parameters(),
    backward_passes_per_step=args.batches_per_allreduce,
)

if resume_from_epoch > 0 and hvd.rank() == 0:
    checkpoint = torch.load(args.checkpoint_format.format(epoch=resume_from_epoch))
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)

print(f"rank {hvd.rank()} starts at epoch {resume_from_epoch}")
for epoch in range(resume_from_epoch, args.epochs):
    train(epoch)
    save_checkpoint(epoch)

checksum = sum(parameter.double().sum().item() for parameter in model.parameters())
print(f"rank {hvd.rank()} of {hvd.size()}: checksum {checksum:.10f}")
