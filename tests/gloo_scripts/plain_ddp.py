"""A plain torch.distributed program, as written for torchrun:

DDP, a subgroup, and no word of allstep.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1)
model = torch.nn.Sequential(
    torch.nn.Conv2d(1, 8, 3),
    torch.nn.BatchNorm2d(8),
    torch.nn.ReLU(),
    torch.nn.Flatten(),
    torch.nn.Linear(8 * 36, 10),
)
ddp = DistributedDataParallel(model)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
torch.manual_seed(100 + rank)
for _ in range(20):
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(
        ddp(torch.randn(16, 1, 8, 8)), torch.randint(10, (16,))
    )
    loss.backward()
    optimizer.step()
pairs = dist.new_group([0, 1], backend="gloo")
total = loss.detach().clone()
if rank in (0, 1):
    dist.all_reduce(total, group=pairs)
assert dist.get_backend() == "gloo"
if rank == 0:
    torch.save({**model.state_dict(), "loss of two ranks": total}, sys.argv[1])
if type(torch.distributed.group.WORLD).__name__ == "ProcessGroup":
    os._exit(
        0
    )  # Gloo's own threads may abort a process that ends (torch 2.13); ours must not need this
