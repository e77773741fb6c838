"""Measurements beside the peers: each benchmark runs allstep and what it is compared with in the same run, turn by turn.

`launch` measures how long it takes to start ranks and to end them. `result` holds the figures of any benchmark, and its three ways
out: a table for people, JSON for programs, a picture.
"""

from allstep.bench.launch import measure_launch
from allstep.bench.result import Missing, Result, Row

__all__ = ["Missing", "Result", "Row", "measure_launch"]
