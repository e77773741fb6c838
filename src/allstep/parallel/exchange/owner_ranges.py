"""Which rank updates which elements, if the ranks of a host share one copy of the weights.

```
parameters     | conv1 | conv2 |              fc1              | fc2 |
by elements    |<------- rank 0 ------->|<------- rank 1 ------->|    equal shares; a parameter
                                                                      may be divided
whole          rank 0: fc1                rank 1: conv2, fc2, conv1   for optimizers that use
                                                                      whole layers (LARS)
```
"""

from collections.abc import Sequence
from typing import NamedTuple

# Elements. Ranges start at multiples of it, which suits vector instructions.
ALIGNED = 64


class ParameterRange(NamedTuple):
    """Elements `start` to `end` of parameter `number`, in memory order."""

    number: int
    start: int
    end: int


def by_elements(sizes: Sequence[int], num_owners: int) -> list[list[ParameterRange]]:
    """Return the ranges of each owner: equally many elements, in the order of the parameters.

    `sizes`: elements of each parameter.
    """
    total = sum(sizes)
    owned: list[list[ParameterRange]] = []
    number, start, done = 0, 0, 0
    for owner in range(num_owners):
        share: list[ParameterRange] = []
        goal = total * (owner + 1) // num_owners
        while number < len(sizes) and (done < goal or owner == num_owners - 1):
            end = min(sizes[number], -(-(start + goal - done) // ALIGNED) * ALIGNED)
            end = sizes[number] if owner == num_owners - 1 else end
            if end > start:
                share.append(ParameterRange(number, start, end))
            done += end - start
            number, start = (number + 1, 0) if end == sizes[number] else (number, end)
        owned.append(share)
    return owned


def by_whole_parameters(sizes: Sequence[int], num_owners: int) -> list[list[ParameterRange]]:
    """Return the ranges of each owner: whole parameters.

    The largest parameters come first, each to the owner with the fewest elements so far.
    """
    loads = [0] * num_owners
    owned: list[list[ParameterRange]] = [[] for _ in range(num_owners)]
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        owner = loads.index(min(loads))
        loads[owner] += sizes[number]
        if sizes[number]:
            owned[owner].append(ParameterRange(number, 0, sizes[number]))
    return [sorted(share) for share in owned]
