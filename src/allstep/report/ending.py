"""How a run ended, or why it has not.

```
last start ── an end line ────────────────────────> finished
           ── an event with the lr of a step ─────> diverged: `train` ended the run for its loss
           ── the event "stopped and saved ..." ──> paused by a signal or --max-time; can resume
           ── none of them, new lines recently ───> going
           ── none of them, no lines for long ────> stopped
```

Only lines after the last start count: a run that was paused and has resumed is going.
"""

from itertools import pairwise
from statistics import median
from typing import Literal

from allstep.runlog import Fields, RunRecord, number

Status = Literal["finished", "diverged", "paused", "going", "stopped"]

# seconds without a new line after which a run counts as stopped, at least _GAPS usual intervals
_MIN_TIMEOUT = 120.0
_GAPS = 10


def status(record: RunRecord, now: float) -> Status:
    """Return the status of the run at the time `now`."""
    if is_finished(record):
        return "finished"
    if divergence(record):
        return "diverged"
    if pause(record):
        return "paused"
    return "going" if now - last_time(record) < silence_timeout(record) else "stopped"


def is_finished(record: RunRecord) -> bool:
    """Return whether there is an end line after the last start."""
    return record.end is not None and record.end["time"] >= record.starts[-1]["time"]


def divergence(record: RunRecord) -> Fields | None:
    """Return the event about the loss that ended the run: the only kind with the lr of a step."""
    found = [
        event
        for event in _last_events(record)
        if number(event, "lr") is not None and "step" in event
    ]
    return found[-1] if found else None


def pause(record: RunRecord) -> Fields | None:
    """Return the event that the run recorded when it was asked to stop and had saved."""
    found = [
        event
        for event in _last_events(record)
        if str(event.get("text")).startswith("stopped and saved")
    ]
    return found[-1] if found else None


def noise_advice(record: RunRecord) -> Fields | None:
    """Return the event at the end of a run about its noise scale and the batch."""
    found = [event for event in _last_events(record) if "noise_scale" in event]
    return found[-1] if found else None


def last_time(record: RunRecord) -> float:
    """Return the time of the last line of the record."""
    return float(max(record.times))


def silence_timeout(record: RunRecord) -> float:
    """Return the seconds without a new line after which a run counts as stopped."""
    gaps = [after["time"] - before["time"] for before, after in pairwise(record.steps)]
    return max(_MIN_TIMEOUT, _GAPS * median(gaps)) if gaps else _MIN_TIMEOUT


def _last_events(record: RunRecord) -> list[Fields]:
    return [event for event in record.events if event["time"] >= record.starts[-1]["time"]]
