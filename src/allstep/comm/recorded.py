"""The pieces of a collective as the timeline sees them: meeting is waiting, combining is adding, crossing is between hosts.

Each does what the piece itself does. They stand in for it while a timeline is written, so that the collectives need not know of it.
"""

from typing import Any

from torch import Tensor

from allstep.comm import recorder
from allstep.comm.arena import Arena, Call
from allstep.comm.crossing import Crossing
from allstep.comm.plan import Plan
from allstep.comm.recorder import ADDING, BETWEEN_HOSTS, WAITING
from allstep.comm.summing import Combine


class RecordedArena(Arena):
    """The same arena, with all its state in common."""

    def __init__(self, arena: Arena) -> None:
        self.__dict__ = arena.__dict__

    def meet(self, call: Call) -> None:
        recorder.during(WAITING, super().meet, call)


class RecordedCombine:
    """The same reduction of two values."""

    def __init__(self, combine: Combine) -> None:
        self.plain = combine

    def __call__(self, *args: Any, **named: Any) -> Any:
        return recorder.during(ADDING, self.plain, *args, **named)


class RecordedCrossing(Crossing):
    """The same way to the other hosts.

    The algorithm gets the reduction itself (Gloo must know which it is), so what it adds up on the way is not told apart.
    """

    def carry(self, flat: Tensor, combine: Combine) -> None:
        if self.lane is not None and flat.numel():
            # The first time this measures the link; all ranks of the lane come to ask, recorded or not.
            algorithm = recorder.during(BETWEEN_HOSTS, self.lane.algorithm_for, flat.numel() * flat.element_size())
            plain = combine.plain if isinstance(combine, RecordedCombine) else combine
            recorder.during(f"{BETWEEN_HOSTS}: {algorithm.name}", super().carry, flat, plain)


def recorded(piece: Any) -> Any:
    """An argument of a procedure, as the timeline wants it."""
    if isinstance(piece, Plan):
        return piece._replace(combine=RecordedCombine(piece.combine))
    return piece
