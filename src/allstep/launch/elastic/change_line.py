"""The line that the launcher of an elastic run prints about each new world.

`allstep train` prints a line of its own instead, after the first step of the new world, since only
the workers know the position and the time without a step.
"""

from collections.abc import Sequence

from allstep.launch.roster.actions import Plan


def change_line(plan: Plan, hosts: Sequence[str]) -> str:
    """Return one line about a new world. hosts: of its members, by rank."""
    where = ", ".join(
        f"rank {rank} is worker {number} on {host}"
        for rank, (number, host) in enumerate(zip(plan.members, hosts, strict=True))
    )
    return (
        f"allstep run: {plan.reason}; generation {plan.generation} has {len(plan.members)} workers,"
        f" {len(plan.new)} of them new: {where}"
    )
