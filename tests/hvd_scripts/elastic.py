"""State that is committed, and restored after a failure; here the workers stay the same."""

import horovod.torch as hvd
import torch
from torch import nn

hvd.init()
torch.manual_seed(hvd.rank())
x = torch.randn(64, 3, generator=torch.Generator().manual_seed(5))
y = x.sum(dim=1, keepdim=True)
data = torch.utils.data.TensorDataset(x, y)

model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
sampler = hvd.elastic.ElasticSampler(data, shuffle=False)
failed = False


@hvd.elastic.run
def train(state):
    global failed
    while state.epoch < 4:
        loader = torch.utils.data.DataLoader(data, batch_size=8, sampler=state.sampler)
        for batch_idx, (inputs, targets) in enumerate(loader):
            if state.epoch == 2 and state.steps == 11 and not failed:
                failed = True
                with torch.no_grad():
                    model.weight.fill_(99.0)  # must be forgotten
                raise hvd.HorovodInternalError("a link was cut, say")
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            state.sampler.record_batch(batch_idx, 8)
            state.steps += 1
            if state.steps % 2 == 0:
                state.commit()
        state.epoch += 1
        state.sampler.set_epoch(state.epoch)
        state.commit()
    return state.steps


def on_state_reset():
    print(f"rank {hvd.rank()}: reset at epoch {state.epoch} step {state.steps}")


state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, steps=0)
state.register_reset_callbacks([on_state_reset])
steps = train(state)
loss = nn.functional.mse_loss(model(x), y)
print(f"rank {hvd.rank()}: {steps} steps, failed {failed}, loss {loss.item():.6f}")
