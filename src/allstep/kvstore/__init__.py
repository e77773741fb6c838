"""A key-value store with MXNet's API: parameter servers, on one host and between hosts.

    kv = allstep.kvstore.create("dist_async")
    kv.init(3, weights)
    kv.set_optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
    kv.pushpull(3, gradient, out=weights)

```
store              KVStore: checks arguments, visits keys; create
training           a whole model: claims, pushes, synchronization points, order log, replay
modes              what push and pull do: local, sync, async, stale; on one host, and with servers
serving            the server process, for stores over several hosts
links              the connections between workers and servers
updates            torch's optimizers on slices of shared memory or on some rows of a table, and the
                   files of their state
memory             locks, slices and waiting in memory that workers share
rules              names, keys, slices, placement, age of gradients, headers: pure functions
push_compression   what set_gradient_compression means
tensor_checks      checks of a script's tensors; sparse_rows: of sparse gradients and row numbers
```

On one host there is no server process (D16): the worker that pushes applies its gradient itself,
slice by slice, under a lock that the kernel frees when its holder dies. Between hosts, servers are
processes, and each worker has a link to each of them.

May import: `parallel`, `comm` and below; no front-end. Start with `store`, then `modes.each_push`;
for `sync=` of a training with `training.shared_model`.
"""

from allstep.kvstore.store import KVStore, create

__all__ = ["KVStore", "create"]
