"""Keys of the store that launcher and ranks share: one side writes them, the other reads them.

=========================  ========  ============================================================
key                        writer    value
=========================  ========  ============================================================
`allstep/hosts`            launcher  JSON: the host of each rank
`allstep/failure/<rank>`   rank      JSON: the first failure of the rank (`comm.health.failure`):
                                     `kind`, `reason`, `peer` (the rank it blames, also itself)
=========================  ========  ============================================================
"""

HOSTS = "allstep/hosts"


def failure_of(rank: int) -> str:
    """Return the key of a rank's failure record."""
    return f"allstep/failure/{rank}"
