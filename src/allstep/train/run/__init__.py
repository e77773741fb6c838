"""A run from its start to its end.

`prepare` checks the config and the data before workers start, `worker` runs on each rank, `setup`
builds the components of a run, `loop` trains, `finish` tests. The package may import all of `train`
except `check` and `use`. Start reading at `loop`.
"""
