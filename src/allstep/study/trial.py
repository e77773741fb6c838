"""One run of a study, and how it ended."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from allstep.runlog import RunRecord, number

FOLDER = "FOLDER"
"""Placeholder of the run folder in a trial's command."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=+-]*")

Status = Literal["done", "stopped", "failed"]


@dataclass(frozen=True)
class Trial:
    """A command that trains and writes `run.jsonl` into its run folder.

    An `end` line at the end of that file marks the trial as done.
    """

    name: str
    """Unique name within the study; also the name of the run folder."""
    command: tuple[str, ...]
    """Command line; an argument FOLDER is replaced by the run folder."""
    resume: tuple[str, ...] = ()
    """Further arguments with which the command resumes an interrupted run.

    Without any, such a run starts again from the beginning.
    """
    seconds: float = 60.0
    """Expected duration.

    Once some trials have been measured, only the ratios between trials count.
    """
    epochs: float | None = None
    """Epochs of training, needed for the fraction that is done; None if unknown."""
    settings: str = ""
    """Digest of all that decides the result: a run of the same name with another digest is refused.

    Empty if the name alone decides the result.
    """
    cores: int = 1
    """Cores that the trial needs while it runs."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """The values that the trial tries, for the code that reads the results."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(
                "trial name: expected a folder name of letters, digits and ._=+-, found"
                f" {self.name!r}"
            )

    def command_line(self, folder: Path, *, resumed: bool) -> list[str]:
        """Return the command for the run folder `folder`, to resume there if `resumed`."""
        named = [str(folder) if each == FOLDER else each for each in self.command]
        return [*named, *self.resume] if resumed else named

    def num_samples(self, record: RunRecord) -> float | None:
        """Return the samples of the whole trial; None if its epochs or data are unknown."""
        data = record.start.get("data")
        total = (
            (self.epochs or 0) * (number(data, "train") or 0) if isinstance(data, Mapping) else 0
        )
        return total if total > 0 else None

    def fraction(self, record: RunRecord) -> float | None:
        """Return the fraction of the trial that is done, from 0 to 1; None if it is unknown."""
        total = self.num_samples(record)
        if total is None:
            return 1.0 if record.end is not None else None
        seen = (number(record.steps[-1], "samples") or 0.0) if record.steps else 0.0
        return min(1.0, max(0.0, seen / total))


@dataclass(frozen=True)
class Outcome:
    """How a trial ended: `done` by itself, `stopped` by the study's rule, or `failed`."""

    trial: Trial
    status: Status
    record: RunRecord
    reason: str = ""
    """Reason for the stop; for a failed trial, the exit status and the last lines of its output."""


Results = Mapping[str, Outcome]
"""Outcomes of the trials that have ended so far, by name of trial."""
