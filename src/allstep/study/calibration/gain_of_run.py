"""What one change would gain in a run of several workers, from the calibration of its model.

A record alone shows how much of the time is waiting, but not what a faster link or a larger batch
would change about it; that needs the ready times and bytes of the gradients. They are in the
calibration that `allstep plan` keeps, `plans/<recipe>.json` next to the folder `runs`, or in the
run folder as `calibration.json`.
"""

from collections.abc import Iterator, Mapping
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

from allstep.console.quantities import percent, seconds
from allstep.errors import UserError
from allstep.plan.answers.what_ifs import WhatIf, best_changes, limit, what_ifs
from allstep.plan.calibration_file import read_calibration
from allstep.plan.prediction import Question, predict
from allstep.runlog import RunRecord, number
from allstep.study.calibration.read_run import calibration_of_run

WORTH = 0.03
"""Fraction of an epoch from which a change is reported."""
_WHY = {
    "share": "the fixed part of small shares",
    "contention": "cores and memory bus shared by the workers of a host",
    "imbalance": "waiting for the slowest worker",
    "exposed": "communication that no computation hides",
    "update": "the update",
    "input": "the input pipeline",
}


class Gain(NamedTuple):
    """What limits a run, and what single changes would save, as text."""

    figures: str
    advice: str


def gain_of_run(folder: Path, config: Mapping[str, Any], record: RunRecord) -> Gain | None:
    """Return what one change would save in an epoch; None without a calibration of the model.

    It is also None for one worker, for asynchronous runs, and if no change saves much.
    """
    world = record.starts[-1].get("world")
    size = number(world, "size") if isinstance(world, Mapping) else None
    if not size or size < 2 or record.syncs:
        return None
    for file in _places(folder, config):
        if file.is_file():
            return _from(folder, config, int(size), _num_hosts(record), file)
    return None


def _places(folder: Path, config: Mapping[str, Any]) -> Iterator[Path]:
    yield folder / "calibration.json"
    recipe = config.get("recipe")
    if isinstance(recipe, str) and recipe.replace("-", "").replace("_", "").isalnum():
        for place in (folder.resolve().parent.parent, Path()):
            yield place / "plans" / f"{recipe}.json"


def _from(
    folder: Path, config: Mapping[str, Any], size: int, num_hosts: int, file: Path
) -> Gain | None:
    try:
        calibration, known = calibration_of_run(folder, read_calibration(file))
    except UserError:
        # A calibration of another model, or a run that has no times yet.
        return None
    batch = _batch(config)
    if batch is None or batch < size:
        return None
    question = Question(max(1, ceil(size / num_hosts)), batch=batch)
    one, now = (predict(calibration, known, question, each) for each in (1, size))
    found = best_changes(what_ifs(calibration, known, question, size))
    # A larger batch changes what is learned.
    worth = [
        each
        for each in found
        if each.saved >= WORTH * each.before and not each.change.startswith("batch=")
    ]
    name = limit(now, one)
    why = "no single loss is large" if name is None else f"most of the loss is {_WHY[name]}"
    if not worth:
        return None
    figures = f"an epoch takes about {seconds(now.epoch)}; {why}"
    return Gain(figures, _advice(worth))


def _advice(worth: list[WhatIf]) -> str:
    parts = [
        f"`{each.change}` would save {seconds(each.saved)} of an epoch"
        f" ({percent(each.saved / each.before, 0)})"
        for each in worth[:3]
    ]
    return "; ".join(parts) + ". `allstep plan --like RUN` predicts combinations."


def _batch(config: Mapping[str, Any]) -> int | None:
    found = config.get("batch")
    return found if isinstance(found, int) and found > 0 else None


def _num_hosts(record: RunRecord) -> int:
    world = record.starts[-1].get("world")
    hosts = world.get("hosts") if isinstance(world, Mapping) else None
    return max(1, len(set(map(str, hosts)))) if isinstance(hosts, list) else 1
