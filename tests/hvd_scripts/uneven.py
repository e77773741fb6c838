"""Ranks with different numbers of batches: who is done early joins, and the others go on."""

import horovod.torch as hvd
import torch
from torch import nn

hvd.init()
torch.manual_seed(hvd.rank())
model = nn.Linear(3, 1, bias=False)
with torch.no_grad():
    model.weight.zero_()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

num_batches = 2 + 3 * hvd.rank()  # 2, 5, 8, ...
for epoch in range(2):
    for _ in range(num_batches):
        optimizer.zero_grad()
        model(torch.ones(1, 3)).sum().backward()  # every gradient is 1
        optimizer.step()
    last = hvd.join()
    # Average divides by all ranks, also by those that are done: a late batch counts 1/size. Who
    # joined early missed the last
    # updates, so the weights are made equal before the next epoch.
    hvd.broadcast_parameters(model.state_dict(), root_rank=last)
    print(
        f"rank {hvd.rank()} epoch {epoch}: last joined {last}, weight"
        f" {model.weight[0, 0].item():.6f}"
    )
total = hvd.allreduce(torch.tensor(float(num_batches)), op=hvd.Sum, name="total")
print(f"rank {hvd.rank()}: {int(total)} batches")
