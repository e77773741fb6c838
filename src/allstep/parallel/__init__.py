"""How replicas train as one: gradients of all ranks become one mean, or one update by their owners.

```
exchange       brings the gradients of the ranks together: AllReduce, Owners; later servers, averaging, sharded states
updates        who changes the weights: every rank all of them, or each rank what it owns
replicas       what an optimizer must know of the other ranks
replicated     ReplicatedOptimizer: holds an exchange and an update; two-part steps, norms, clipping
subclass       an optimizer of a new class, made without calling a constructor
```

May import: `comm`, `optim` and below; no front-end. Start with `replicated`, then
`exchange.protocol`.
"""
