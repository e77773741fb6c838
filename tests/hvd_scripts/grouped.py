"""Many tensors in one call, and gradients in groups."""

import horovod.torch as hvd
import torch
from torch import nn

hvd.init()
torch.manual_seed(0)
rank, size = hvd.rank(), hvd.size()

tensors = [torch.full((n,), float(rank + n)) for n in (1, 5, 1000)] + [torch.tensor([rank, 2])]
sums = hvd.grouped_allreduce(tensors, op=hvd.Sum, name="sums")
print(f"rank {rank}: sums {[each[0].item() for each in sums]}")
hvd.grouped_allreduce_(tensors[:2], op=hvd.Max, name="max")
print(f"rank {rank}: max {[each[0].item() for each in tensors[:2]]}")
handle = hvd.grouped_allgather_async([torch.tensor([rank]), torch.ones(rank, 2)], name="gather")
numbers, rows = hvd.synchronize(handle)
print(f"rank {rank}: gathered {numbers.tolist()} {tuple(rows.shape)}")
parts = hvd.grouped_reducescatter(
    [torch.arange(float(size)), torch.ones(2 * size, 3)], op=hvd.Sum, name="parts"
)
print(f"rank {rank}: parts {parts[0].tolist()} {tuple(parts[1].shape)}")

model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), groups=2)
x = torch.randn(64, 4)
y = x.sum(dim=1, keepdim=True).sin()
share = slice(rank * 64 // size, (rank + 1) * 64 // size)
for _ in range(60):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x[share]), y[share]).backward()
    optimizer.synchronize()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with optimizer.skip_synchronize():
        optimizer.step()
loss = hvd.allreduce(nn.functional.mse_loss(model(x[share]), y[share]).detach(), name="loss")
print(f"rank {rank}: loss {loss.item():.6f}")
