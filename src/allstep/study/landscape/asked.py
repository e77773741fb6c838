"""What `allstep landscape` asks for, and what it gets; as plain values, without torch."""

from dataclasses import dataclass
from pathlib import Path

from allstep.study.landscape.points import Grid, Kind
from allstep.study.landscape.result import Around, Line
from allstep.train.folder.existing_run import Evaluation


@dataclass(frozen=True)
class Asked:
    """A request for the landscape of a run, and for the line to a second one."""

    first: Evaluation
    second: Evaluation | None
    grid: Grid
    seed: int
    limit: float
    """Seconds that the survey may take."""

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Return the surveys that the request needs."""
        return ("around",) if self.second is None else ("around", "line")

    def folders(self) -> list[Path]:
        """Return the folders of the runs."""
        return [each.folder for each in (self.first, self.second) if each is not None]

    def names(self) -> list[str]:
        """Return the names of the runs' folders, with a number where both are equal."""
        names = [folder.resolve().name for folder in self.folders()]
        return (
            [f"{name} ({i})" for i, name in enumerate(names, 1)]
            if len({*names}) == 1 < len(names)
            else names
        )


@dataclass(frozen=True)
class Expected:
    """What is known before a survey starts."""

    where: str
    """Description of the samples."""
    num_samples: int
    num_points: int
    num_left: int
    """Points that are not computed yet."""
    point_seconds: float
    seconds: float
    """Expected seconds of all points that are left."""
    num_workers: int


@dataclass(frozen=True)
class Landscape:
    """The result of a request."""

    around: Around
    line: Line | None
    which: str
    """Weights that were evaluated: last or best."""
    samples: int
    """Number of samples that the first run was trained on."""
    where: str
    num_samples: int
    files: tuple[Path, ...]
    notes: tuple[str, ...]
