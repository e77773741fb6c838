"""The faults of a worker of an elastic run, where ranks change and workers are replaced.

The launcher gives each worker a rank for faults, which never changes: its rank in the first world,
or that of a worker that has ended (`launch.elastic.fault_ranks`). What has occurred does not occur
again in a replacement, except for random faults, which occur over the whole run.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from allstep.faults.spec import RandomFaults, Spec, join, parse_all

FAULT_RANK = "ALLSTEP_FAULT_RANK"
"""Environment variable with the rank for faults of a worker, for its helper processes."""


@dataclass(frozen=True)
class WorkerFaults:
    """Which of the run's faults one worker has.

    rank: of its faults. occurred: faults that occurred before it joined, as the user wrote them.
    seconds: since the first world formed, when the sequences of random faults began.
    """

    rank: int
    occurred: frozenset[str] = frozenset()
    seconds: float = 0.0

    def left(self, text: str) -> str:
        """Return those faults of a text for ALLSTEP_FAULTS that this worker may still cause."""
        return join([str(spec) for spec in parse_all(text) if self._may_occur(spec)])

    def _may_occur(self, spec: Spec) -> bool:
        return isinstance(spec, RandomFaults) or str(spec) not in self.occurred

    def to_reply(self) -> dict[str, Any]:
        """Return the fields as JSON can hold them."""
        return {"rank": self.rank, "occurred": sorted(self.occurred), "seconds": self.seconds}

    @classmethod
    def of_reply(cls, reply: Mapping[str, Any]) -> Self:
        """Return what `to_reply` has made."""
        return cls(reply["rank"], frozenset(reply["occurred"]), reply["seconds"])
