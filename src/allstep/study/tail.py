"""Read a run record while it is written; each call reads only the new lines."""

from pathlib import Path

from allstep.files.bounded import open_regular
from allstep.runlog import KINDS, Fields, RunRecord, parse

_AT_ONCE = 64 << 20
"""Maximum bytes per call; the next call continues there."""


class Follower:
    """Reader of the run record at `path`; the record is empty while the file does not exist."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._forget()

    def _forget(self) -> None:
        self._read = 0
        self._found: dict[str, list[Fields]] = {kind: [] for kind in KINDS}
        self._record = RunRecord()

    def record(self) -> RunRecord:
        """Return the record as written so far."""
        if self._take():
            self._record = RunRecord(*(tuple(self._found[kind]) for kind in KINDS))
        return self._record

    def _take(self) -> bool:
        """Read new whole lines; return whether there were any."""
        try:
            with open_regular(self.path) as file:
                # a shorter file was started again
                if file.seek(0, 2) < self._read:
                    self._forget()
                file.seek(self._read)
                text = file.read(_AT_ONCE)
        except OSError:
            # No record yet, or none that can be read: the run itself reports that.
            return False
        whole = text[: text.rfind(b"\n") + 1]
        # Skip a line that is longer than one read, instead of waiting for its end forever.
        self._read += len(whole) if whole or len(text) < _AT_ONCE else len(text)
        for line in whole.splitlines():
            if (fields := parse(line)) is not None:
                self._found.get(fields["kind"], []).append(fields)
        return bool(whole)
