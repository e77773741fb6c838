"""Reads a run record while it is written: each look reads only what is new."""

import json
from pathlib import Path

from allstep.runlog import KINDS, Fields, RunRecord


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
            with self.path.open("rb") as file:
                if file.seek(0, 2) < self._read:  # begun anew
                    self._forget()
                file.seek(self._read)
                text = file.read()
        except FileNotFoundError:
            return False
        whole = text[: text.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in whole.splitlines():
            self._keep(line)
        return bool(whole)

    def _keep(self, line: bytes) -> None:
        """As `runlog.read` does: what cannot be read, or is of no kind we know, is left out."""
        try:
            fields = json.loads(line)
        except ValueError:
            return
        kind = fields.get("kind") if isinstance(fields, dict) else None
        if isinstance(kind, str):
            self._found.get(kind, []).append(fields)
