"""Adasum: gradients of one direction are averaged, those at right angles added; the learning rate
stays that of one worker."""

import horovod.torch as hvd
import torch
from torch import nn

hvd.init()
torch.manual_seed(1)
rank, size = hvd.rank(), hvd.size()

across = torch.zeros(size, dtype=torch.float64)
across[rank] = rank + 1.0
added = hvd.allreduce(across, op=hvd.Adasum, name="across")
averaged = hvd.allreduce(
    torch.tensor([3.0, 4.0], dtype=torch.float64) * (rank + 1), op=hvd.Adasum, name="along"
)
print(
    f"rank {rank}: across {added.tolist()} along {[round(value, 6) for value in averaged.tolist()]}"
)

x = torch.randn(128, 6)
y = x @ torch.arange(6.0).unsqueeze(1)
model = nn.Linear(6, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = hvd.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(), op=hvd.Adasum
)
for step in range(60):
    batch = torch.arange(step * 16, step * 16 + 16).remainder(128)[rank::size]
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x[batch]), y[batch]).backward()
    optimizer.step()
loss = nn.functional.mse_loss(model(x), y)
print(f"rank {rank}: loss {loss.item():.6f} weights {model.weight.double().sum().item():.9f}")
