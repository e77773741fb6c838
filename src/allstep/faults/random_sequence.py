"""The sequence of random faults: time, kind and rank of each, from the seed alone.

Every process computes the whole sequence and carries out its own part, so no process coordinates
them. The time between two faults is uniform from 0.5 to 1.5 of `every`.
"""

import random
from collections.abc import Iterator
from dataclasses import replace

from allstep.faults.spec import Fault, RandomFaults


def sequence(faults: RandomFaults, size: int) -> Iterator[Fault]:
    """Yield the faults of a run of `size` workers without end, each with its seconds and rank."""
    draw, seconds = random.Random(f"allstep {faults.seed}"), 0.0
    while True:
        seconds += faults.every * (0.5 + draw.random())
        choice = faults.choices[int(draw.random() * len(faults.choices))]
        # Drawn in any case, so that times and kinds do not depend on `rank`.
        rank = int(draw.random() * size)
        victim = rank if faults.rank is None else faults.rank
        yield replace(choice, rank=victim, seconds=round(seconds, 3))
