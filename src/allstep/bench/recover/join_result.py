"""Results of `allstep bench recover --part join`: how long the others pause when a worker joins.

| figure | from | to |
|---|---|---|
| gap | the last step of the old world | the end of the first step with the new worker |
| pause | | the gap without one ordinary step and its commit |
| entered | the last step | all ranks have formed the new world and begin to broadcast |
| broadcast | that | the state has arrived |
| saved | that | it has been copied for `restore` |

The slowest of the workers that were there before counts. The rest of the gap is the first step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from rich.table import Table

from allstep.bench.recover.live_run import first
from allstep.bench.recover.notes import Note
from allstep.console.rich_table import figure_columns

COPY, FUNCTIONS = "one copy", "hvd functions"
SINGLE, TORCH = "a request for each tensor", "dist.broadcast of each tensor"
# Seconds on a quiet machine, by model.
PAUSE_TARGETS: Mapping[str, float] = {"resnet18": 0.3, "alexnet": 1.0}
COPIES_TARGET = 6.0


@dataclass(frozen=True)
class Joining:
    """One joining worker, as a worker that was there before sees it; all in seconds.

    `step`: an ordinary step with its commit, in the new world.
    """

    gap: float
    step: float
    entered: float
    broadcast: float
    saved: float

    @classmethod
    def of(cls, notes: Sequence[Note]) -> "Joining":
        """Return it from the notes of a worker since the last step of the old world."""
        left, *after = notes
        steps = [note.at for note in after if note.kind == "step"]
        syncing, synced = first(after, "syncing").at, first(after, "synced").at
        # The commit after the last step saves, too.
        saving = next(note.at for note in after if note.kind == "saving" and note.at >= syncing)
        return cls(
            steps[0] - left.at,
            median(later - earlier for earlier, later in pairwise(steps)),
            syncing - left.at,
            saving - syncing,
            synced - saving,
        )

    @property
    def pause(self) -> float:
        """The seconds that the joining costs."""
        return self.gap - self.step


@dataclass(frozen=True)
class JoinRow:
    """One model of `nbytes` with its optimizer's state.

    `joinings` of each repetition, as the slowest worker saw it. `broadcasts`: the seconds of each
    contender of the broadcast alone, on the slowest rank.
    """

    model: str
    nbytes: int
    joinings: Sequence[Joining]
    broadcasts: Mapping[str, Sequence[float]]

    @property
    def copy(self) -> float:
        """The median seconds of copying the bytes once."""
        return median(self.broadcasts[COPY])

    @property
    def title(self) -> str:
        """Model and size."""
        return f"{self.model}, {self.nbytes / 1e6:.0f} MB"

    def part(self, name: str) -> float:
        """Return the median of a figure of `Joining`."""
        middle: float = median(getattr(each, name) for each in self.joinings)
        return middle

    def as_json(self) -> dict[str, Any]:
        """Return all figures."""
        return {
            "name": f"join, {self.model}",
            "bytes": self.nbytes,
            "copy": self.copy,
            "pauses": [each.pause for each in self.joinings],
            "joinings": [vars(each) for each in self.joinings],
            "median": self.part("pause"),
            "target": PAUSE_TARGETS.get(self.model),
            "copies": self.part("pause") / self.copy,
            "broadcasts": {name: list(each) for name, each in self.broadcasts.items()},
        }


def join_table(rows: Sequence[JoinRow]) -> Table:
    """Return the pauses; "/copy": as a multiple of one copy of the bytes."""
    figures = ["pause", "min", "max", "target", "gap", "entered", "broadcast", "saved", "/copy"]
    table = figure_columns([""], figures)
    for row in rows:
        pauses = [each.pause for each in row.joinings]
        seconds = [row.part("pause"), min(pauses), max(pauses)]
        parts = [row.part(name) for name in ("gap", "entered", "broadcast", "saved")]
        target = PAUSE_TARGETS.get(row.model)
        table.add_row(
            row.title,
            *(f"{each:.3f}" for each in seconds),
            "" if target is None else f"{target:.1f}",
            *(f"{each:.3f}" for each in parts),
            f"{row.part('pause') / row.copy:.1f}",
        )
    return table


def broadcast_table(rows: Sequence[JoinRow]) -> Table:
    """Return the broadcasts alone."""
    table = figure_columns([""], ["median ms", "min", "max", "/copy", "target"])
    for row in rows:
        for name, seconds in row.broadcasts.items():
            shown = [f"{1e3 * each:.1f}" for each in (median(seconds), min(seconds), max(seconds))]
            target = f"{COPIES_TARGET:.0f}" if name == FUNCTIONS else ""
            ratio = f"{median(seconds) / row.copy:.1f}"
            table.add_row(f"{row.title}: {name}", *shown, ratio, target)
    return table
