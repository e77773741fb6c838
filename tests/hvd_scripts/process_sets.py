"""Some ranks among themselves: sets known from the start, and one that comes and goes."""

import horovod.torch as hvd
import torch

size = 3
even, odd = hvd.ProcessSet(range(0, size, 2)), hvd.ProcessSet(range(1, size, 2))
hvd.init(process_sets=[even, odd])
mine = even if even.included() else odd

total = hvd.allreduce(torch.tensor([float(hvd.rank())]), op=hvd.Sum, process_set=mine, name="mine")
everyone = hvd.allgather(total, name="all")
print(
    f"rank {hvd.rank()}: set {mine.process_set_id} {mine.ranks} sum {total.item():.0f}, all"
    f" {everyone.tolist()}"
)

model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = hvd.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(), process_set=mine
)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.full((1, 2), (hvd.rank() + 1.0) ** 2)).sum().backward()
    optimizer.step()
weights = hvd.allgather(model.weight.detach(), name="weights")
print(f"rank {hvd.rank()}: same as 0 {[bool(torch.equal(row, weights[0])) for row in weights]}")
hvd.shutdown()

hvd.init(process_sets="dynamic")
ends = hvd.add_process_set([0, size - 1])
if ends.included():
    found = hvd.broadcast_object(
        {"from": hvd.rank()}, root_rank=size - 1, name="word", process_set=ends
    )
    print(f"rank {hvd.rank()}: place {ends.rank()} of {ends.size()}, {found}")
hvd.barrier()
print(f"rank {hvd.rank()}: removed {hvd.remove_process_set(ends)}, id {ends.process_set_id}")
