"""How replicas train together: the gradients of all ranks become one mean or one update by owners.

```
exchange       combines the gradients of the ranks: AllReduce, Owners; later: servers, averaging,
               sharded states
updates        which rank changes which weights: every rank all of them, or each rank its own
replicas       what an optimizer must know about the other ranks
replicated     ReplicatedOptimizer: has an exchange and an update; two-phase steps, norms, clipping
sync_mode      the modes between synchronous and asynchronous, and their names
subclass       an optimizer of a new class, made without calling a constructor
```

May import: `comm`, `optim` and below; no front-end. Start with `replicated`, then
`exchange.exchange`.
"""
