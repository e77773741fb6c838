"""Bad samples: counted, listed and skipped; too many of them are an error.

If the user names a quarantine list, each bad sample becomes one line of JSON in it:

    {"number": 17, "file": "train-00003.tfrecord", "offset": 91023, "reason": "the checksum of the
    data is wrong", "epoch": 0}

A sample that is bad in several epochs is listed and counted once. Samples that an earlier run wrote
into the same list count as well, so a resumed run keeps its budget. The list is opened for each
line, so that it is complete after a kill. A full disk is only a warning, since the run does not
depend on the list. Each rank writes a file of its own: rank 0 the named file, rank 3 for instance
`quarantine-rank3.jsonl`.
"""

import json
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

from allstep.console.escape import escaped
from allstep.data.sources.source import BadSample, Place
from allstep.errors import DataError
from allstep.files.bounded import MAX_JSON, open_to_append, read_regular

# Number of bad samples that an error message quotes.
_SHOWN = 3
# Number of samples of one rank below which all may be bad by chance.
_FEW = 10


def default_budget(n: int) -> int:
    """Return how many of n samples may be bad by default: the larger of 100 and 0.1% of n."""
    return max(100, n // 1000)


def path_of_rank(path: Path | str, rank: int) -> Path:
    """Return the path of the list of `rank`, where `path` is that of rank 0."""
    path = Path(path)
    return path if rank == 0 else path.with_name(f"{path.stem}-rank{rank}{path.suffix}")


class Quarantine:
    """The known bad samples of one rank.

    More than `budget` bad samples are an error; with `strict` the first one is. `path` is the list
    to continue and extend (None: no list).
    """

    def __init__(self, budget: int, *, strict: bool = False, path: Path | None = None) -> None:
        self.budget, self.strict, self.path = budget, strict, path
        self._first: list[BadSample] = []
        self._numbers: set[int] = set()
        self._can_write = path is not None
        for bad in _listed(path) if path is not None else ():
            self._add(bad)

    @property
    def num_bad(self) -> int:
        """Return the number of samples found bad, each counted once."""
        return len(self._numbers)

    def note(self, bad: BadSample, epoch: int) -> None:
        """Count and list `bad` if it is new.

        Raises DataError if there are too many, also on every further call.
        """
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
                " run continues"
            )
            warnings.warn(escaped(message), RuntimeWarning, stacklevel=2)

    def _too_many(self) -> str:
        first = "; ".join(str(bad) for bad in self._first)
        where = (
            f"all are listed in {self.path}"
            if self._can_write
            else "set `quarantine=` to a file to list all"
        )
        advice = (
            "`allstep data verify` checks the whole dataset, and with a larger `budget` the run"
            " continues without them"
        )
        return (
            f"{self.num_bad} samples are bad, more than the {self.budget} allowed; the first:"
            f" {first}; {where}; {advice}"
        )


class WholeEpoch:
    """Detects that a whole epoch had no good sample for this rank.

    In that case single files are not damaged: something is wrong with all samples. One of many
    ranks has few samples of a small dataset, and all of these may be bad by chance, so it takes
    `_FEW` bad samples, or all samples of the dataset.
    """

    def __init__(self, n: int) -> None:
        # An epoch that starts in the middle counts as good: its first samples were not checked.
        self._n, self._good, self._bad = n, 1, 0

    def check(self, start: int, stop: int, bad: Sequence[BadSample], good: int) -> None:
        """Count the samples of a global batch that covers `start` to `stop` of its epoch.

        Raises DataError if it is the last one and the epoch had no good sample.
        """
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
    """Yield the bad samples of an existing list, each once; skip lines that cannot be parsed.

    Such lines come from other programs, or from a kill in the middle of a line.
    """
    seen = set()
    try:
        content = read_regular(path, MAX_JSON) if path.is_file() else b""
    except OSError:
        return
    for line in content.decode(errors="replace").splitlines():
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
