"""Measure the start of two ranks under allstep run, torchrun and mpirun, as in the README.

The same as `allstep bench launch -r 10`.
"""

from rich.console import Console

from allstep.bench import measure_launch

if __name__ == "__main__":
    Console().print(measure_launch(repetitions=10).table())
