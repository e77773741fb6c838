"""The injected fault `cut`: the connections of all groups of this process close.

The victim records why, then closes its connections. A rank on another host that sees them end reads
the record; a rank of this host, which uses memory instead of connections, finds the failure posted
there. So every rank raises `PeerLost` for the victim, whatever connects them.
"""

from allstep.comm.health.failure import Failure
from allstep.comm.health.guard import Guard
from allstep.comm.health.threads import watch


def cut_groups() -> None:
    """Close the connections of all groups of this process."""
    for group in watch().groups():
        if isinstance(group, Guard):
            name = group.names[group.rank]
            reason = f"lost rank {name} (injected fault: its connections were cut)"
            group.fail(Failure("PeerLost", reason, peer=name, teller=name))
