"""What happens between two points at which all ranks of a run agree: a *round* (D15, D17).

`round` is the protocol, `choose` returns the implementation for the `sync` of a config. `each_step`
is the round of synchronous training: one update of all ranks. `local_steps` is that of local SGD
and DiLoCo: some updates of each rank alone, then the mean of their weights. `due` has the positions
at which a round ends. The package imports `train.run.placed_job` and `train.run.progress` of its
parent, and what is below `run`; the loop imports it.
"""
