"""Keys of the store that launcher and ranks share: one side writes them, the other reads them.

=========================  ========  ============================================================
key                        writer    value
=========================  ========  ============================================================
`allstep/hosts`            launcher  JSON: the host of each rank
`allstep/failure/<rank>`   rank      JSON: the first failure of the rank (`comm.health.failure`):
                                     `kind`, `reason`, `peer` (the rank it blames, also itself)
`allstep/faults`           ranks     number of injected faults that have occurred (a counter)
`allstep/fault/<n>`        rank      JSON: the n-th injected fault, from 1 (`faults.reports`):
                                     `fault`, `rank`, `text`
=========================  ========  ============================================================
"""

HOSTS = "allstep/hosts"
FAULTS = "allstep/faults"


def failure_of(rank: int) -> str:
    """Return the key of a rank's failure record."""
    return f"allstep/failure/{rank}"


def fault_record(number: int | str) -> str:
    """Return the key of the record of an injected fault.

    number: its place, from 1; "" for the beginning of all these keys.
    """
    return f"allstep/fault/{number}"
