"""The lines that the launcher of an elastic run prints about its worlds.

About a new world `allstep train` prints a line of its own instead, after its first step, since only
the workers know the position and the time without a step.
"""

from collections.abc import Sequence

from allstep.launch.roster.actions import Plan
from allstep.launch.roster.elastic_policy import Policy


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


def too_few_line(reason: str, num_left: int, policy: Policy) -> str:
    """Return one line about a world that cannot be formed yet. reason: why the last one ended."""
    return (
        f"allstep run: {reason}; {num_left} of at least {policy.min_workers} workers are left:"
        f" waiting up to {policy.elastic_timeout:g} s for others"
    )
