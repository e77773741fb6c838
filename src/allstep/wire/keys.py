"""Keys that the launcher and the ranks share: one side writes what the other reads.

=========================  ========  ============================================================
`allstep/hosts`            launcher  JSON: the host of each rank
`allstep/failure/<rank>`   rank      JSON: the first failure of the rank (`comm.health.failure`):
                                     `kind`, `reason`, `peer` (the rank it blames, also itself)
=========================  ========  ============================================================
"""

HOSTS = "allstep/hosts"


def failure_of(rank: int) -> str:
    """Return the key for the failure of a rank."""
    return f"allstep/failure/{rank}"
