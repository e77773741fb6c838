"""Tasks: what is learned (D24). A task is a value; the rest of `train` works with any task.

`task` defines the interface: losses, weights, sums, metrics with the objective, kind of input.
`tally` adds sums over batches and ranks. `classification` is the only task so far, with `mistakes`
for its wrong predictions; `make_task` makes the task of a run. The package may import `config`,
`input` and `watch`; the loop, checkpoints and evaluation are in layers above it.
"""
