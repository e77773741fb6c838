"""The README's claim about starting: two ranks under allstep run, torchrun and mpirun.

The same as `allstep bench launch -r 10`.
"""

from rich.console import Console

from allstep.bench import measure_launch

if __name__ == "__main__":
    Console().print(measure_launch(repetitions=10).table())
