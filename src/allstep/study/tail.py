"""Reads a run record while it is written: each look reads only what is new."""

from pathlib import Path

from allstep.files.bounded import open_regular
from allstep.runlog import KINDS, Fields, RunRecord, parse

_AT_ONCE = 64 << 20
"""Bytes; the next look reads on."""


class Follower:
    """`record()` is the record at `path` as far as it has been written; empty while there is none."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._forget()

    def _forget(self) -> None:
        self._read = 0
        self._found: dict[str, list[Fields]] = {kind: [] for kind in KINDS}
        self._record = RunRecord()

    def record(self) -> RunRecord:
        """The newest state of it."""
        if self._take():
            self._record = RunRecord(*(tuple(self._found[kind]) for kind in KINDS))
        return self._record

    def _take(self) -> bool:
        """Whether whole lines have been added."""
        try:
            with open_regular(self.path) as file:
                if file.seek(0, 2) < self._read:  # begun anew
                    self._forget()
                file.seek(self._read)
                text = file.read(_AT_ONCE)
        except OSError:
            # None yet, or no record at all: the run itself reports that.
            return False
        whole = text[: text.rfind(b"\n") + 1]
        # A line that fills all that is read at once has no end that is worth waiting for.
        self._read += len(whole) if whole or len(text) < _AT_ONCE else len(text)
        for line in whole.splitlines():
            if (fields := parse(line)) is not None:
                self._found.get(fields["kind"], []).append(fields)
        return bool(whole)
