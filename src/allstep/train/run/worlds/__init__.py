"""A run in one world after the other: what an elastic `allstep train` adds to the loop (D15).

`generations` leads from world to world, `elastic_loop` undoes a step that failed, `standby`
prepares a worker that joins, and `changes` reports. Imports: everything else in `train.run` but
`worker`. Start with `generations`.
"""
