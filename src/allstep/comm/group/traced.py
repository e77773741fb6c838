"""The pieces of a collective as the timeline sees them: meeting is waiting, combining is adding,
crossing is between hosts.

Each does what the piece itself does. They stand in for it while a timeline is written, so that the
collectives need not know of it.
"""

from typing import Any

from torch import Tensor

from allstep.comm.group.across_hosts import Crossing
from allstep.comm.group.plan import Plan
from allstep.comm.memory.arena import Arena, Call
from allstep.comm.memory.reduce import Combine
from allstep.comm.timeline import recorder
from allstep.comm.timeline.recorder import ADDING, BETWEEN_HOSTS, WAITING


class RecordedArena(Arena):
    """The same arena, with all its state in common."""

    def __init__(self, arena: Arena) -> None:
        self.__dict__ = arena.__dict__

    def barrier(self, call: Call) -> None:
        recorder.during(WAITING, super().barrier, call)


class RecordedCombine:
    """The same reduction of two values."""

    def __init__(self, combine: Combine) -> None:
        self.plain = combine

    def __call__(self, *args: Any, **named: Any) -> Any:
        return recorder.during(ADDING, self.plain, *args, **named)


class RecordedCrossing(Crossing):
    """The same way to the other hosts.

    The algorithm gets the reduction itself (Gloo must know which it is), so what it adds up on the
    way is not told apart.
    """

    def carry(self, flat: Tensor, combine: Combine) -> None:
        if self.lane is not None and flat.numel():
            # The first time this measures the link; all ranks of the lane come to ask, recorded or
            # not.
            algorithm = recorder.during(
                BETWEEN_HOSTS, self.lane.algorithm_for, flat.numel() * flat.element_size()
            )
            plain = combine.plain if isinstance(combine, RecordedCombine) else combine
            recorder.during(f"{BETWEEN_HOSTS}: {algorithm.name}", super().carry, flat, plain)


def recorded(argument: Any) -> Any:
    """An argument of a procedure, as the timeline wants it."""
    if isinstance(argument, Plan):
        return argument._replace(combine=RecordedCombine(argument.combine))
    return argument
