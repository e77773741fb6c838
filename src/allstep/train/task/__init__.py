"""Tasks: what is learned (D24). A task is a value; the rest of `train` works with any task.

`task` defines the interface: losses, tally, metrics with their direction, kind of input.
`classification` is the only task so far. A new task is a module here, selected in `run.setup`. The
package may import `config`, `input` and `watch`; the loop, checkpoints and evaluation are in layers
above it.
"""
