"""What push and pull do: in one process, at each push, or once per round.

```
key_values      the protocol KeyValues, which a store calls
local_values    mode local: one process
shared_values   what the modes in shared memory have in common: keys, optimizer, barrier
each_push       modes async and stale: the pusher applies its gradient
part_forms      what servers must know of keys and their parts, as text
failover        another server continues the parts of a lost one (modes async, stale)
each_round      mode sync: the gradients of all workers are summed in rank order
```

May import: `updates`, `memory`, `rules`. Start with `each_push`.
"""
