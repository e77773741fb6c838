"""How replicas train as one: gradients of all ranks become one mean, or one update by their owners.

```
gradients          buckets, reduced while autograd still works
owned_gradients    each rank gets the sums of the parameters that it owns
two_part_step      a step that waits for the sums, then updates
shared_weights     one copy of the weights for the ranks of a host
```

May import: `comm`, `engine`, `optim` and below; no front-end. Start with `gradients`.
"""
