"""Bad samples: counted, listed and skipped, until there are too many.

Each goes as one line of JSON into the quarantine list, where a list was asked for:

    {"number": 17, "file": "train-00003.tfrecord", "offset": 91023, "reason": "the checksum of the
    data is wrong", "epoch": 0}

A sample that is bad again in a later epoch is listed and counted once; so is one that an earlier
run wrote into the same list, which therefore counts in the budget of a run that resumes. The list
is opened for each line, so that it is whole after a kill; a disk that is full is a warning, since
the run can do without the list. Each rank writes a file of its own: rank 0 the one that was named,
rank 3 one called `quarantine-rank3.jsonl`.
"""

import json
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

from allstep.console.escape import escaped
from allstep.data.sources.source import BadSample, Place
from allstep.errors import DataError
from allstep.files.bounded import MAX_JSON, open_to_append, read_regular

_SHOWN = 3  # bad samples that an error quotes
_FEW = 10  # samples of a worker that may all be bad by chance


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
        for bad in _listed(path) if path is not None else ():
            self._add(bad)

    @property
    def num_bad(self) -> int:
        """How many samples were found bad, each counted once."""
        return len(self._numbers)

    def note(self, bad: BadSample, epoch: int) -> None:
        """Counts one, if it is new; raises DataError when there are too many, also when that was
        said before."""
        if bad.number not in self._numbers:
            self._add(bad)
            self._write(bad, epoch)
        if self.strict:
            raise DataError(f"{bad} (strict: the first bad sample is an error)") from bad
        if self.num_bad > self.budget:
            raise DataError(self._too_many())

    def _add(self, bad: BadSample) -> None:
        self._numbers.add(bad.number)
        if len(self._first) < _SHOWN:
            self._first.append(bad)

    def _write(self, bad: BadSample, epoch: int) -> None:
        if not self._can_write or self.path is None:
            return
        line = json.dumps({**bad.to_json(), "epoch": epoch})
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open_to_append(self.path) as file:
                file.write(f"{line}\n".encode())
        except OSError as error:
            self._can_write = False
            message = (
                f"{self.path}: bad samples can no longer be listed: {error.strerror or error}; the"
                " run goes on"
            )
            warnings.warn(escaped(message), RuntimeWarning, stacklevel=2)

    def _too_many(self) -> str:
        first = "; ".join(str(bad) for bad in self._first)
        where = (
            f"all are listed in {self.path}"
            if self._can_write
            else "`quarantine=` names a file for a list of all"
        )
        advice = (
            "`allstep data verify` checks the whole set, and a larger `budget` lets the run go on"
            " without them"
        )
        return (
            f"{self.num_bad} samples are bad, more than the {self.budget} allowed; the first:"
            f" {first}; {where}; {advice}"
        )


class WholeEpoch:
    """Notices when a whole epoch had nothing good for this worker: that is no damage, something is
    wrong with all samples.

    A worker of many has few samples of a small set, and all of them may be bad while others go on;
    so it takes `_FEW` of them, or all there are.
    """

    def __init__(self, n: int) -> None:
        self._n, self._good, self._bad = (
            n,
            1,
            0,
        )  # an epoch that was entered half-way counts as good

    def check(self, start: int, stop: int, bad: Sequence[BadSample], good: int) -> None:
        """After a global batch that went from `start` to `stop` of its epoch; DataError when it was
        the last and nothing was good."""
        if start == 0:
            self._good = self._bad = 0
        self._good += good
        self._bad += len(bad)
        if stop == self._n and not self._good and self._bad >= min(self._n, _FEW):
            last = f"; the last: {bad[-1]}" if bad else ""
            raise DataError(
                f"none of the {self._bad} samples of an epoch was good{last}; `allstep data verify`"
                " lists them"
            )


def _listed(path: Path) -> Iterator[BadSample]:
    """What a list has already, once each; lines that are not ours or were torn by a kill say
    nothing."""
    seen = set()
    try:
        lines = (
            read_regular(path, MAX_JSON).decode(errors="replace").splitlines()
            if path.is_file()
            else []
        )
    except OSError:
        return
    for line in lines:
        try:
            fields = json.loads(line)
            bad = BadSample(
                int(fields["number"]),
                Place(str(fields["file"]), fields["offset"]),
                str(fields["reason"]),
            )
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            continue
        if bad.number not in seen:
            yield bad
        seen.add(bad.number)
