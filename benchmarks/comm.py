"""Measure allreduce on one host, compared with Gloo and Open MPI.

The same as `allstep bench comm`.
"""

from rich.console import Console

from allstep.bench import measure_comm

if __name__ == "__main__":
    Console().print(measure_comm().table())
