"""The duties of rank 0: the lock of the run folder, the run record, TensorBoard, the terminal.

In an elastic run they pass to another worker when rank 0 is lost. The kernel frees the lock of a
process that has ended, and the record is append-only, so that the successor continues it. A
successor that does not see the run folder (on another host) continues without record and
checkpoints, and prints that at once and every minute.
"""

import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from allstep import faults, runlog
from allstep.console.escape import print_notice
from allstep.errors import ConfigError, UserError
from allstep.runlog import RunLog
from allstep.train.checkpoint.write_and_read import Snapshot
from allstep.train.folder.claim import RECORD
from allstep.train.folder.run_lock import hold
from allstep.train.run.fault_events import recorded
from allstep.train.watch.callback import Callback, Callbacks
from allstep.train.watch.events import Opening
from allstep.train.watch.record_callback import Record
from allstep.train.watch.straggler_report import StragglerReport
from allstep.train.watch.tensorboard import TensorBoard
from allstep.train.watch.terminal import Display

_REMIND_SECONDS = 60.0


class Duties:
    """The duties of rank 0, as far as this process has them."""

    def __init__(self) -> None:
        self.callbacks = Callbacks()
        """Receive the events of the run; none unless this process is rank 0."""
        self.snapshot: Snapshot | None = None
        """The checkpoint that rank 0 has read, from which the run resumes."""
        self._held = ExitStack()
        self._recorded = ExitStack()
        self._problem: str | None = None
        self._printed_at = float("-inf")

    @property
    def are_taken(self) -> bool:
        """Whether this process has the duties."""
        return bool(self.callbacks.callbacks)

    def lock(self, folder: Path) -> None:
        """Lock the run folder. Raise ConfigError if another process holds the lock for long."""
        self._held.enter_context(hold(folder))

    def open(self, folder: Path) -> None:
        """Open the record, TensorBoard's file and the display. Raise ConfigError if that fails."""
        self.callbacks.callbacks = _callbacks(folder)
        known: set[str] = set()
        if faults.active is not None:
            # Of a lost rank 0 that this process succeeds.
            known = {str(event.get("text")) for event in runlog.read(folder / RECORD).events}
        self._recorded.enter_context(recorded(self.callbacks.callbacks, known))

    def take_over(self, folder: Path, opening: Opening) -> None:
        """Continue the duties of a rank 0 that is lost."""
        try:
            if not folder.is_dir():
                raise ConfigError(f"{folder}: this host has no such folder")
            self.lock(folder)
            self.open(folder)
        except UserError as error:
            self._problem = f"the run continues, but is not saved: {error}"
            self.callbacks.callbacks = [Display()]
            self.remind()
        self.watch_speed()
        self.callbacks.take_over(opening)

    def has_recorded(self, folder: Path, figures: Mapping[str, Any]) -> bool:
        """Return whether the run record has an event with these figures."""
        with suppress(OSError, UserError):
            events = runlog.read(folder / RECORD).events
            return any(figures.items() <= event.items() for event in events)
        return False

    def watch_speed(self) -> None:
        """Report slow workers as well."""
        if self.are_taken:
            self.callbacks.callbacks.append(StragglerReport(self.callbacks.event))

    def remind(self) -> None:
        """Print once a minute that the run folder cannot be used, if so."""
        now = time.monotonic()
        if self._problem is not None and now - self._printed_at >= _REMIND_SECONDS:
            self._printed_at = now
            print_notice(self._problem)

    def close(self) -> None:
        """Close the callbacks and release the lock. The duties may be taken again."""
        self._recorded.close()
        self.callbacks.close()
        self.callbacks.callbacks, self._problem = [], None
        self._printed_at = float("-inf")
        self._held.close()


def _callbacks(out: Path) -> list[Callback]:
    try:
        record = RunLog(out / RECORD)
    except OSError as error:
        raise ConfigError(
            f"{out / RECORD}: cannot be written: {error.strerror or error}"
        ) from error
    return [Record(record), TensorBoard(out / "tensorboard"), Display()]
