"""Predicts the speed of training on many workers: simulator, published runs, levels of knowledge.

The package is pure: no clock, no torch, no randomness. The formulas of collectives come from
`allstep.costs`, which the choice of an algorithm at run time uses too (D22).

```
setting                     profile of one worker, cluster, policy
simulator, fused_gradients, servers     a step and its parts
models, transports          shapes of published models, what links deliver
published_runs, read_series     measured series, and the user's own
levels                      predictions by how much is known
published_table             predicted against published
calibration, calibration_file   what was measured of a model on a machine, also as a file
knowledge                   what a calibration shows about a cluster
prediction                  speed and parts of a step of a number of workers
answers                     tables, what-ifs and goodput for a user's question
```

Start with `simulator`.
"""
