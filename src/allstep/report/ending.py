"""How a run ended, or why it has not.

```
last start ── an end line ──────────────────────────> finished
           ── an event with the rate of a step ──────> diverged: `train` ends a run whose loss has left all bounds
           ── the event "stopped and saved ..." ─────> paused: told to, by a signal or --max-time; it can go on
           ── none of them ── silent for long? ──────> stopped, else going
```

Only what came after the last start counts: a run that was paused and has gone on is under way.
"""

from itertools import pairwise
from statistics import median
from typing import Literal

from allstep.runlog import Fields, RunRecord, number

Status = Literal["finished", "diverged", "paused", "going", "stopped"]

# seconds without a word after which a run is not taken to be going on; more when its words are rare
_PATIENCE = 120.0
_GAPS = 10


def status(record: RunRecord, now: float) -> Status:
    """In one word."""
    if is_finished(record):
        return "finished"
    if divergence(record):
        return "diverged"
    if pause(record):
        return "paused"
    return "going" if now - last_word(record) < patience(record) else "stopped"


def is_finished(record: RunRecord) -> bool:
    """Whether the last start has an end."""
    return record.end is not None and record.end["time"] >= record.starts[-1]["time"]


def divergence(record: RunRecord) -> Fields | None:
    """What was told about the loss that ended the run: the only event with the rate of a step."""
    told = [
        event
        for event in _last_events(record)
        if number(event, "lr") is not None and "step" in event
    ]
    return told[-1] if told else None


def pause(record: RunRecord) -> Fields | None:
    """What was told when the run was asked to stop and had saved."""
    told = [
        event
        for event in _last_events(record)
        if str(event.get("text")).startswith("stopped and saved")
    ]
    return told[-1] if told else None


def noise_advice(record: RunRecord) -> Fields | None:
    """What the measured noise scale means for the batch; told at the end of a run."""
    told = [event for event in _last_events(record) if "noise_scale" in event]
    return told[-1] if told else None


def last_word(record: RunRecord) -> float:
    """The time of the last line."""
    every = (
        record.starts,
        record.steps,
        record.evals,
        record.checkpoints,
        record.events,
        record.ends,
    )
    return max(float(line["time"]) for lines in every for line in lines)


def patience(record: RunRecord) -> float:
    """Seconds of silence that say nothing yet."""
    gaps = [after["time"] - before["time"] for before, after in pairwise(record.steps)]
    return max(_PATIENCE, _GAPS * median(gaps)) if gaps else _PATIENCE


def _last_events(record: RunRecord) -> list[Fields]:
    return [event for event in record.events if event["time"] >= record.starts[-1]["time"]]
