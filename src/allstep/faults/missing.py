"""Names the faults that did not occur, at the end of a run.

The launcher does it for the faults of its environment, since its store has the records of all
ranks. A process does it at exit for those that its launcher does not know: without a store it knows
only its own faults, so each rank names those of its rank, and rank 0 also those without a rank.
"""

import os
from collections.abc import Container, Iterable, Sequence

from allstep.console.escape import print_notice
from allstep.faults.reports import Reports
from allstep.faults.spec import Spec


def name_missing(faults: Iterable[str], occurred: Iterable[str]) -> list[str]:
    """Return a line for each fault that did not occur."""
    seen = set(occurred)
    return [f"fault {each} did not occur" for each in dict.fromkeys(faults) if each not in seen]


def print_missing(specs: Sequence[Spec], reports: Reports, unknown: Container[str]) -> None:
    """Print the faults that did not occur, as far as the launcher does not; called at exit.

    unknown: faults that the launcher does not know.
    """
    has_store = bool(os.environ.get("ALLSTEP_STORE"))
    mine = [spec for spec in specs if _is_named_by(reports.rank, spec, unknown, has_store)]
    if mine:
        occurred = {each.fault for each in reports.all_recorded()} | reports.occurred
        for line in name_missing(map(str, mine), occurred):
            print_notice(line)


def _is_named_by(rank: int, spec: Spec, unknown: Container[str], has_store: bool) -> bool:
    if has_store:
        return rank == 0 and str(spec) in unknown
    return rank == (spec.rank or 0)
