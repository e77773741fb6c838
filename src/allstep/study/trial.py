"""One run of a study, and how it ended."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from allstep.runlog import RunRecord, number

FOLDER = "FOLDER"
"""Stands in a trial's command for its run folder."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=+-]*")

Status = Literal["done", "stopped", "failed"]


@dataclass(frozen=True)
class Trial:
    """A command that trains and writes `run.jsonl` into its run folder; the last line of that says
    whether it is through."""

    name: str
    """Within its study; also the name of its run folder."""
    command: tuple[str, ...]
    """The word FOLDER in it becomes the run folder."""
    resume: tuple[str, ...] = ()
    """What the command needs besides to go on with a run that was cut.

    Nothing: such a run begins anew.
    """
    seconds: float = 60.0
    """How long it should take.

    Once some trials have been measured only the ratios between them count.
    """
    epochs: float | None = None
    """How long it trains: tells from its record how far it is."""
    settings: str = ""
    """A digest of all that decides what it finds: a run of that name with another one is another
    run. Empty: the name says all."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What it tries, for those who read the results."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(
                "a trial's name is a folder's name of letters, digits and ._=+-, found"
                f" {self.name!r}"
            )

    def words(self, folder: Path, *, resumed: bool) -> list[str]:
        """The command line."""
        named = [str(folder) if word == FOLDER else word for word in self.command]
        return [*named, *self.resume] if resumed else named

    def num_samples(self, record: RunRecord) -> float | None:
        """That it will see; None when it or its record does not say."""
        data = record.start.get("data")
        total = (
            (self.epochs or 0) * (number(data, "train") or 0) if isinstance(data, Mapping) else 0
        )
        return total if total > 0 else None

    def fraction(self, record: RunRecord) -> float | None:
        """How much of it is done, from 0 to 1; None when the record does not say."""
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
    """Why it was stopped; of one that failed, the exit status and the last lines of its output."""


Results = Mapping[str, Outcome]
"""What is known so far, by the names of trials."""
