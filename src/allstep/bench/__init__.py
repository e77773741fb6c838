"""Benchmarks: each runs allstep and the libraries it is compared with alternately, in the same run.

`launch` measures how long it takes to start and end ranks, `comm` how long they need to sum a
tensor, `step` how much of a rank's speed is left when ranks train together, `recover` how long a
run pauses when a worker is killed, `sync` how long a push and a pull take, `data` how many images a
loader delivers, `plan` how near predicted steps are to measured ones. `result` holds the figures of
a benchmark and its three outputs: a table, JSON, and a plot; `comm.result`, `step.result`,
`recover.result`, `sync.result`, `data.result` and `plan.result` hold those of the other benchmarks.
"""

from allstep.bench.comm.measure import measure_comm
from allstep.bench.comm.result import CommResult
from allstep.bench.launch import measure_launch
from allstep.bench.result import Missing, Result, Row
from allstep.bench.step.measure import measure_step
from allstep.bench.step.result import StepResult

__all__ = [
    "CommResult",
    "Missing",
    "Result",
    "Row",
    "StepResult",
    "measure_comm",
    "measure_launch",
    "measure_step",
]
