"""How a gradient changes a key: torch's optimizers on slices, with their state in shared memory.

```
optimizer_class   class and settings of an optimizer, checked and comparable between workers
slice_state       what an optimizer keeps for a slice, and where that is in memory
key_optimizer     the optimizer of one key: applies a gradient to a slice
row_updates       the same for some rows of a matrix, with lazy state
states_file       save_optimizer_states and load_optimizer_states
```

May import: `memory`, `rules`, and `parallel` for which optimizers may be cut into slices.
"""
