"""A process group that counts its collectives, for injected faults with `op=N`.

It replaces the default group only if there is such a fault, so that other runs do not pay for it.
"""

from typing import Any

from torch._C._distributed_c10d import Work

from allstep import faults
from allstep.comm.group.process_group import AllstepGroup


class CountedGroup(AllstepGroup):
    """A group whose collectives are points of `faults`."""

    def allreduce(self, *given: Any, **named: Any) -> Work:
        _count()
        return super().allreduce(*given, **named)

    def _move(self, name: str, *args: Any) -> Work:
        _count()
        return super()._move(name, *args)


def _count() -> None:
    if faults.active is not None:
        faults.active.at_op()


def kind_of_default() -> type[AllstepGroup]:
    """Return the class of torch's default group."""
    counts = faults.active is not None and faults.active.counts_ops
    return CountedGroup if counts else AllstepGroup
