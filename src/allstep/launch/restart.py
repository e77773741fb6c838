"""Restart policies: functions that decide what follows a failure whose cause is known.

`fixed` is the only one: the world of the run does not change, so a lost rank ends the run. A policy
that forms another world (D14, `elastic`) would be one more function here and one more answer.
"""

from collections.abc import Callable
from typing import NamedTuple

from allstep.launch.cause import Failure


class Situation(NamedTuple):
    """The input of a policy: the failure that caused the others, the failed and running ranks."""

    cause: Failure
    failed: frozenset[int]
    running: frozenset[int]


class Stop(NamedTuple):
    """An answer: stop the running ranks and end the run with the exit code of the cause."""


Answer = Stop
Policy = Callable[[Situation], Answer]


def fixed(situation: Situation) -> Stop:
    """Stop the others: no rank of a fixed world can be replaced."""
    return Stop()
