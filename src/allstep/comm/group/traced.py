"""Parts of a collective that record their time for the timeline.

A barrier counts as waiting, a reduction as adding, an exchange with other hosts as between hosts.
Each class behaves like the part that it wraps and replaces it while a timeline is written, so the
collectives do not depend on the timeline.
"""

from typing import Any

from torch import Tensor

from allstep.comm.group.across_hosts import Crossing
from allstep.comm.group.plan import Plan
from allstep.comm.memory.arena import Arena, Call
from allstep.comm.memory.reduce import Combine
from allstep.comm.network.owner_parts import Parts
from allstep.comm.timeline import recorder
from allstep.comm.timeline.recorder import ADDING, BETWEEN_HOSTS, WAITING


class RecordedArena(Arena):
    """An arena that records its barriers; it shares all state with the wrapped one."""

    def __init__(self, arena: Arena) -> None:
        self.__dict__ = arena.__dict__

    def barrier(self, call: Call) -> None:
        recorder.during(WAITING, super().barrier, call)


class RecordedCombine:
    """A reduction of two values that records its time."""

    def __init__(self, combine: Combine) -> None:
        self.plain = combine

    def __call__(self, *args: Any, **named: Any) -> Any:
        return recorder.during(ADDING, self.plain, *args, **named)


class RecordedCrossing(Crossing):
    """A crossing that records its time.

    The algorithm gets the unwrapped reduction (Gloo must know which one it is), so its sums are not
    recorded separately.
    """

    def carry(self, flat: Tensor, combine: Combine) -> None:
        if self.lane is not None and flat.numel():
            # The first call measures the link, which all ranks of the lane do, recorded or not.
            algorithm = recorder.during(
                BETWEEN_HOSTS, self.lane.algorithm_for, flat.numel() * flat.element_size()
            )
            plain = combine.plain if isinstance(combine, RecordedCombine) else combine
            recorder.during(f"{BETWEEN_HOSTS}: {algorithm.name}", super().carry, flat, plain)

    def sum_for_owners(self, parts: Parts, combine: Combine) -> None:
        plain = combine.plain if isinstance(combine, RecordedCombine) else combine
        recorder.during(f"{BETWEEN_HOSTS}: to owners", super().sum_for_owners, parts, plain)

    def from_owners(self, parts: Parts) -> None:
        recorder.during(f"{BETWEEN_HOSTS}: from owners", super().from_owners, parts)


def recorded(argument: Any) -> Any:
    """Return an argument of a procedure, with a recorded reduction if it is a plan."""
    if isinstance(argument, Plan):
        return argument._replace(combine=RecordedCombine(argument.combine))
    return argument
