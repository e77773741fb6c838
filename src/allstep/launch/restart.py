"""What happens after a failure whose cause is known: a policy, which is a plain function.

`fixed` is the only one: the world of the run does not change, so a lost rank ends it. A policy that
forms a smaller or another world (D14, `elastic`) is one more function here and one more answer.
"""

from collections.abc import Callable
from typing import NamedTuple

from allstep.launch.cause import Failure


class Situation(NamedTuple):
    """What a policy knows: the failure that the others follow from, and who is left."""

    cause: Failure
    failed: frozenset[int]
    running: frozenset[int]


class Stop(NamedTuple):
    """Stop the ranks that still run, and end the run with the code of the cause."""


Answer = Stop
Policy = Callable[[Situation], Answer]


def fixed(situation: Situation) -> Stop:
    """Stop the others: no rank of a fixed world can be replaced."""
    return Stop()
