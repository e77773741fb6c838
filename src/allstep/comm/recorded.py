"""The pieces of a collective as the timeline sees them: meeting is waiting, combining is adding, crossing is between hosts.

Each does what the piece itself does. They stand in for it while a timeline is written, so that the collectives need not know of it.
"""

from functools import partial
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


class RecordedCrossing(Crossing):
    """The same way to the other hosts. What the algorithm adds up counts as adding, the rest as between hosts."""

    def carry(self, flat: Tensor, combine: Combine) -> None:
        if self.lane is not None and flat.numel():
            # The first time this measures the link; all ranks of the lane come to ask, recorded or not.
            algorithm = recorder.during(BETWEEN_HOSTS, self.lane.algorithm_for, flat.numel() * flat.element_size())
            recorder.during(f"{BETWEEN_HOSTS}: {algorithm.name}", super().carry, flat, combine)


def recorded(piece: Any) -> Any:
    """An argument of a procedure, as the timeline wants it."""
    if isinstance(piece, Plan):
        return piece._replace(combine=partial(recorder.during, ADDING, piece.combine))
    return piece
