"""The run that a user requests with `allstep train`: one value for the command and its workers."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from allstep.train.config.recipes import DEFAULT
from allstep.train.health.stop import parse_time


@dataclass(frozen=True)
class TrainRequest:
    """A requested run, before any check."""

    source: str = DEFAULT
    """A recipe, or the path of a config file."""
    overrides: Sequence[str] = ()
    """Keys that differ from `source`, as key=value."""
    data: Path | None = None
    """The folder with the dataset's files; None: the usual places."""
    out: Path | None = None
    """The run folder; None: a new one."""
    resume: bool = False
    """Continue the run in `out`, if there is one."""
    must_exist: bool = False
    """With `resume`: raise an error if there is none."""
    max_time: str | None = None
    """Save and stop before this time is over, such as 1h30m."""

    @property
    def max_seconds(self) -> float | None:
        """The value of `max_time` in seconds. Raises ConfigError if it is not a time."""
        return None if self.max_time is None else parse_time(self.max_time)
