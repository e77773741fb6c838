"""Tasks: what is learned (D24). A task is a value; everything else in `train` works with any.

`task` describes the seam: losses, tally, metrics with their direction, kind of input.
`classification` is the only task so far. A further one is a module here, chosen in `run.setup`.
May import `config`, `input` and `watch`; the loop, checkpoints and evaluation are above.
"""
