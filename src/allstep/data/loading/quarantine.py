"""Bad samples: counted, listed and skipped, until there are too many.

Each goes as one line of JSON into the quarantine list, where a list was asked for:

    {"number": 17, "file": "train-00003.tfrecord", "offset": 91023, "reason": "the checksum of the data is wrong", "epoch": 0}

A sample that is bad again in a later epoch is listed and counted once. The list is opened for each line, so that it is whole after a
kill; a disk that is full is a warning, since the run can do without the list. Each rank writes a file of its own: rank 0 the one that
was named, rank 3 one called `quarantine-rank3.jsonl`.
"""

import json
import warnings
from pathlib import Path

from allstep.data.sources.source import BadSample
from allstep.errors import DataError

_SHOWN = 3  # bad samples that an error quotes


def default_budget(n: int) -> int:
    """How many of n samples may be bad when nobody says: 100, or 0.1% of a large set."""
    return max(100, n // 1000)


def path_of_rank(path: Path | str, rank: int) -> Path:
    """The list of `rank` when that of rank 0 is called `path`."""
    path = Path(path)
    return path if rank == 0 else path.with_name(f"{path.stem}-rank{rank}{path.suffix}")


class Quarantine:
    """What is known to be bad. More than `budget` are an error; none may be with `strict`."""

    def __init__(self, budget: int, *, strict: bool = False, path: Path | None = None) -> None:
        self.budget, self.strict, self.path = budget, strict, path
        self._first: list[BadSample] = []
        self._numbers: set[int] = set()
        self._can_write = path is not None

    @property
    def num_bad(self) -> int:
        """How many samples were found bad, each counted once."""
        return len(self._numbers)

    def note(self, bad: BadSample, epoch: int) -> None:
        """Counts one; raises DataError when that is one too many."""
        if bad.number in self._numbers:
            return
        self._numbers.add(bad.number)
        if len(self._first) < _SHOWN:
            self._first.append(bad)
        self._write(bad, epoch)
        if self.strict:
            raise DataError(f"{bad} (strict: the first bad sample is an error)") from bad
        if self.num_bad > self.budget:
            raise DataError(self._too_many())

    def _write(self, bad: BadSample, epoch: int) -> None:
        if not self._can_write or self.path is None:
            return
        place = {"file": bad.place.file, "offset": bad.place.offset}
        line = json.dumps({"number": bad.number, **place, "reason": bad.reason, "epoch": epoch})
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a") as file:
                file.write(line + "\n")
        except OSError as error:
            self._can_write = False
            message = f"{self.path}: bad samples can no longer be listed: {error.strerror or error}; the run goes on"
            warnings.warn(message, RuntimeWarning, stacklevel=2)

    def _too_many(self) -> str:
        first = "; ".join(str(bad) for bad in self._first)
        where = f"all are listed in {self.path}" if self._can_write else "`quarantine=` names a file for a list of all"
        advice = "`allstep data verify` checks the whole set, and a larger `budget` lets the run go on without them"
        return f"{self.num_bad} samples are bad, more than the {self.budget} allowed; the first: {first}; {where}; {advice}"
