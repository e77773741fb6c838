"""The ranks by which injected faults know the workers of an elastic run (`faults.elastic`).

In the first world it is the rank. A worker that joins later takes the lowest one that no living
worker has, so that a fault with `rank=1` has one carrier at a time.
"""

from collections.abc import Iterable
from itertools import count
from typing import Any

from allstep.faults import WorkerFaults, launcher_records
from allstep.launch.elastic.worker_table import WorkerTable
from allstep.wire import Server


class FaultRanks:
    """The ranks for faults of the workers of one run; they never change."""

    def __init__(self, workers: WorkerTable) -> None:
        self._workers = workers
        self._ranks: dict[int, int] = {}
        self._began: float | None = None

    def at_first_place(self, worker: int, store: Server, now: float) -> dict[str, Any] | None:
        """Return what a worker needs for its first place (`WorkerFaults`); None if it had one."""
        if worker in self._ranks:
            return None
        self._began = now if self._began is None else self._began
        taken = {self._ranks.get(each.number) for each in self._workers.living()}
        rank = next(number for number in count() if number not in taken)
        self._ranks[worker] = rank
        occurred = frozenset(each.fault for each in launcher_records.occurred(store))
        return WorkerFaults(rank, occurred, now - self._began).to_reply()

    def of(self, workers: Iterable[int]) -> set[int]:
        """Return the ranks of workers, as the records of faults have them."""
        return {self._ranks[each] for each in workers if each in self._ranks}
