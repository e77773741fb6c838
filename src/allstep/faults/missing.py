"""Names the faults that did not occur, at the end of a run.

The launcher does it, since its store has the records of all ranks, and the faults of a worker's own
command line. Without a launcher's store a process does it at exit. It knows only its own faults, so
each rank names those of its rank, and rank 0 also those without a rank.
"""

import os
from collections.abc import Iterable, Sequence

from allstep.console.escape import print_notice
from allstep.faults.reports import Reports
from allstep.faults.spec import Spec


def name_missing(faults: Iterable[str], occurred: Iterable[str]) -> list[str]:
    """Return a line for each fault that did not occur."""
    seen = set(occurred)
    return [f"fault {each} did not occur" for each in dict.fromkeys(faults) if each not in seen]


def print_missing(specs: Sequence[Spec], reports: Reports) -> None:
    """Print the faults of this process that did not occur; called at exit.

    A no-op with a launcher's store.
    """
    if os.environ.get("ALLSTEP_STORE"):
        return
    mine = [spec for spec in specs if reports.rank == (spec.rank or 0)]
    for line in name_missing(map(str, mine), reports.occurred):
        print_notice(line)
