"""A Hugging Face Accelerate program.

Accelerate knows the backends by name and refuses others; on a CPU it asks for gloo.
"""

import os
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

accelerator = Accelerator(cpu=True)
set_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(20, 32), torch.nn.ReLU(), torch.nn.Linear(32, 3))
samples = torch.utils.data.TensorDataset(torch.randn(256, 20), torch.randint(3, (256,)))
loader = torch.utils.data.DataLoader(samples, batch_size=16, shuffle=True)
model, optimizer, loader = accelerator.prepare(
    model, torch.optim.AdamW(model.parameters(), lr=0.01), loader
)
for _ in range(2):
    for data, target in loader:
        loss = torch.nn.functional.cross_entropy(model(data), target)
        optimizer.zero_grad()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
losses = accelerator.gather(loss.detach())
assert torch.distributed.get_backend() == accelerator.state.backend == "gloo"
if accelerator.is_main_process:
    torch.save({**accelerator.unwrap_model(model).state_dict(), "losses": losses}, sys.argv[1])
if type(torch.distributed.group.WORLD).__name__ == "ProcessGroup":
    os._exit(
        0
    )  # Gloo's own threads may abort a process that ends (torch 2.13); ours must not need this
accelerator.end_training()
