"""MXNet's tutorial of its key-value store, and its test of `dist_sync`, on torch tensors."""

import torch
from allstep import kvstore

SHAPE = (2, 3)


def one_process():
    """A store in this process: values, devices, a function that updates, lists of keys."""
    kv = kvstore.create("local")
    kv.init(3, torch.ones(SHAPE) * 2)
    a = torch.zeros(SHAPE)
    kv.pull(3, out=a)
    print("initialized:", a.unique().item())
    kv.push(3, torch.ones(SHAPE) * 8)
    kv.pull(3, out=a)
    print("pushed:", a.unique().item())
    kv.push(3, [torch.ones(SHAPE) for device in range(4)])  # summed before it is stored
    kv.pull(3, out=a)
    print("pushed by 4 devices:", a.unique().item())

    def update(key, gradient, stored):
        stored += gradient * 2

    kv.set_updater(update)
    kv.push(3, torch.ones(SHAPE))
    kv.pull(3, out=a)
    print("updated:", a.unique().item())
    keys = [5, 7, 9]
    kv.init(keys, [torch.ones(SHAPE)] * len(keys))
    kv.push(keys, [[torch.ones(SHAPE) for device in range(4)]] * len(keys))
    b = [torch.zeros(SHAPE) for key in keys]
    kv.pull(keys, out=b)
    print("a list of keys:", [each.unique().item() for each in b])


def all_workers(name, steps=3):
    """A store of all workers. Each pushes its rank + 1 in each step; the optimizer subtracts it."""
    with kvstore.create(name) as kv:
        kv.init("weights", torch.zeros(SHAPE))
        kv.set_optimizer(torch.optim.SGD, lr=1.0)
        weights = torch.zeros(SHAPE)
        for _ in range(steps):
            kv.pushpull("weights", torch.ones(SHAPE) * (kv.rank + 1), out=weights)
        kv.barrier()
        kv.pull("weights", out=weights)
        expected = -steps * kv.num_workers * (kv.num_workers + 1) / 2
        assert weights.unique().item() == expected
        if kv.rank == 0:
            print(f"{name} on {kv.num_workers} workers:", expected)


if __name__ == "__main__":
    one_process()
    for name in ("dist_sync", "dist_async", "dist_stale:2"):
        all_workers(name)
