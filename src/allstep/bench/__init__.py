"""Measurements next to the peers: each benchmark runs allstep and what it is compared with in the
same run, turn by turn.

`launch` measures how long it takes to start ranks and to end them, `comm` how long they need to sum
a tensor, `step` how much of a rank's speed is left when ranks train together. `result` holds the
figures of a benchmark, and its three ways out: a table for people, JSON for programs, an image;
`comm.result`, `step.result` and `data.result` those of the others.
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
