"""Results of `allstep bench recover`: seconds without a finished step, and seconds of forming.

| part | from | to |
|---|---|---|
| noticed | the kill | the last survivor's error; under torchrun the start of the new workers |
| formed | that | the new world with its first group |
| first step | that | the end of the first step, on the slowest worker |

Forming is a part of it: from the launcher's reply to a worker until all its groups exist.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from allstep.bench.recover.join_result import JoinRow, broadcast_table, join_table
from allstep.bench.recover.live_run import Notes, first
from allstep.bench.recover.quiet import QuietRow
from allstep.bench.result import Missing, absences, document
from allstep.console.rich_table import figure_columns

ALLSTEP, TORCHRUN = "allstep, hvd.elastic", "torchrun, restarted"
TORCHFT, TORCHFT_FAST = "torchft, its defaults", "torchft, 1 s heartbeat"
LARGE = "allstep, 2 GB killed"
# Seconds on a quiet machine.
NOTICED_TARGET, REST_TARGET = 0.1, 0.3
# torchrun takes at least this many times as long.
RATIO_TARGET = 4.0


@dataclass(frozen=True)
class Recovery:
    """One kill: seconds from it until all survivors noticed, formed a world, and did a step."""

    noticed: float
    formed: float
    stepped: float

    @classmethod
    def of(cls, killed: float, after: Notes, kind_of_step: str = "step") -> "Recovery":
        """Return the recovery that the notes of the survivors show: the slowest of them counts."""

        def latest(kind: str) -> float:
            return max(first(notes, kind).at for notes in after.values()) - killed

        return cls(latest("noticed"), latest("formed"), latest(kind_of_step))


@dataclass(frozen=True)
class RecoverRow:
    """One contender and its recoveries."""

    name: str
    recoveries: Sequence[Recovery]

    @property
    def gaps(self) -> list[float]:
        """The seconds without a finished step of each recovery."""
        return [each.stepped for each in self.recoveries]

    @property
    def parts(self) -> dict[str, float]:
        """The median of each part of the gap."""
        every = self.recoveries
        return {
            "noticed": median(each.noticed for each in every),
            "formed": median(each.formed - each.noticed for each in every),
            "first step": median(each.stepped - each.formed for each in every),
        }


@dataclass(frozen=True)
class FormRow:
    """Seconds to form a world with all its groups; `target` on a quiet machine, None if none."""

    name: str
    seconds: Sequence[float]
    target: float | None


@dataclass(frozen=True)
class RecoverResult:
    """All rows, in the order of the tables; parts that were not measured are empty."""

    rows: Sequence[RecoverRow]
    forming: Sequence[FormRow]
    missing: Sequence[Missing]
    joins: Sequence[JoinRow] = ()
    quiet: QuietRow | None = None

    def ratio(self, row: RecoverRow) -> float | None:
        """Return the gap as a multiple of allstep's; None if that was not measured."""
        ours = next((each for each in self.rows if each.name == ALLSTEP), None)
        return median(row.gaps) / median(ours.gaps) if ours else None

    def table(self) -> Group:
        """Return the tables of the measured parts for the console."""
        shown: list[RenderableType] = []
        if self.rows:
            title = "seconds without a finished step after one of 3 workers was killed"
            shown += [title, self._gaps()]
        if self.forming:
            shown += ["forming a world with 3 groups", self._forming()]
        if self.joins:
            shown += ["seconds that 2 workers pause when a third one joins", join_table(self.joins)]
            shown += ["the broadcast of the state alone, to 3 ranks", broadcast_table(self.joins)]
        if self.quiet is not None:
            shown += ["a step when no worker is lost", self.quiet.table()]
        return Group(*shown)

    def _gaps(self) -> Table:
        figures = ["median", "min", "max", "noticed", "formed", "step", "/allstep"]
        table = figure_columns([""], figures)
        for row in self.rows:
            gaps, ratio = row.gaps, self.ratio(row)
            seconds = [median(gaps), min(gaps), max(gaps), *row.parts.values()]
            cells = [f"{each:.3f}" for each in seconds]
            table.add_row(row.name, *cells, "-" if ratio is None else f"{ratio:.1f}")
        return table

    def _forming(self) -> Table:
        table = figure_columns(["workers"], ["median ms", "min", "max", "target (quiet)"])
        for row in self.forming:
            seconds = median(row.seconds), min(row.seconds), max(row.seconds)
            cells = [f"{1e3 * each:.1f}" for each in seconds]
            table.add_row(row.name, *cells, "" if row.target is None else f"{1e3 * row.target:.0f}")
        return table

    def absences(self) -> list[str]:
        """Return a line for each contender that is missing from the table."""
        return absences(self.missing)

    def to_json(self) -> str:
        """Return every figure of the tables and the machine, as JSON."""
        gaps = [self._as_json(row) for row in self.rows]
        forming = [
            {
                "name": row.name,
                "forming": list(row.seconds),
                "median": median(row.seconds),
                "target": row.target,
            }
            for row in self.forming
        ]
        joins = [row.as_json() for row in self.joins]
        quiet = [] if self.quiet is None else [self.quiet.as_json()]
        return document("recover", gaps + forming + joins + quiet, self.missing)

    def _as_json(self, row: RecoverRow) -> dict[str, Any]:
        return {
            "name": row.name,
            "gaps": row.gaps,
            "median": median(row.gaps),
            "min": min(row.gaps),
            "max": max(row.gaps),
            "parts": row.parts,
            "ratio": self.ratio(row),
            "noticed": [each.noticed for each in row.recoveries],
        }
