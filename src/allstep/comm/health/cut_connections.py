"""Injected faults of groups: `cut` closes the connections of all groups of this process.

The victim records why, then closes its connections. A rank on another host that sees them end reads
the record; a rank of this host, which uses memory instead of connections, finds the failure posted
there. So every rank raises `PeerLost` for the victim, whatever connects them.
"""

from allstep import faults
from allstep.comm.health.failure import Failure
from allstep.comm.health.guard import Guard
from allstep.comm.health.threads import watch


def begin_faults(rank: int, size: int, own: faults.WorkerFaults | None = None) -> None:
    """Read the faults of this process, rank `rank` of `size`, unless that has been done.

    own: which of them a worker of an elastic run has.
    """
    faults.handle("cut", _cut_groups)
    faults.begin(rank, size, own)


def _cut_groups() -> None:
    for group in watch().groups():
        if isinstance(group, Guard):
            name = group.names[group.rank]
            reason = f"lost rank {name} (injected fault: its connections were cut)"
            group.fail(Failure("PeerLost", reason, peer=name, teller=name))
