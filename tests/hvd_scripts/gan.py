"""Two models against each other, each with an optimizer of its own; while the generator learns, the
critic is frozen."""

from itertools import pairwise

import horovod.torch as hvd
import torch
from torch import nn

hvd.init()
torch.manual_seed(10 + hvd.rank())
torch.set_num_threads(1)


def model(*widths):
    layers = [layer for pair in pairwise(widths) for layer in (nn.Linear(*pair), nn.LeakyReLU(0.2))]
    return nn.Sequential(*layers[:-1])


def distributed(model, prefix, lr):
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr, betas=(0.5, 0.999))
    names = [(f"{prefix}.{name}", parameter) for name, parameter in model.named_parameters()]
    return hvd.DistributedOptimizer(optimizer, named_parameters=names)


generator, critic = model(4, 32, 2), model(2, 32, 32, 1)
optimizer_g = distributed(generator, "generator", 2e-3)
optimizer_d = distributed(critic, "critic", 2e-3)
loss_of = nn.BCEWithLogitsLoss()
centre = torch.tensor([2.0, -1.0])

for _ in range(300):
    real = centre + 0.5 * torch.randn(64, 2)
    fake = generator(torch.randn(64, 4))

    optimizer_d.zero_grad()
    loss_real = loss_of(critic(real), torch.ones(64, 1))
    loss_fake = loss_of(critic(fake.detach()), torch.zeros(64, 1))
    (loss_real + loss_fake).backward()
    optimizer_d.step()

    optimizer_g.zero_grad()
    for parameter in critic.parameters():
        parameter.requires_grad_(False)
    loss_of(critic(fake), torch.ones(64, 1)).backward()
    optimizer_g.step()
    for parameter in critic.parameters():
        parameter.requires_grad_(True)

found = hvd.allreduce(generator(torch.randn(512, 4)).mean(dim=0).detach(), name="centre")
weights = sum(
    each.double().sum().item() for model in (generator, critic) for each in model.parameters()
)
print(f"rank {hvd.rank()}: centre {found[0]:.2f} {found[1]:.2f} weights {weights:.9f}")
