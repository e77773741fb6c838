"""A run from its start to its end.

`prepare` checks before anything starts, `worker` runs in each rank, `setup` builds the parts,
`loop` runs them, `finish` tests and reports. May import: all of `train` but `check` and `use`.
Start with `loop`.
"""
