"""Updates to a goal by batch, from the runs of a finished study, or from a run's noise scale."""

from collections.abc import Iterator
from pathlib import Path

from allstep import runlog
from allstep.errors import ConfigError
from allstep.plan.answers.goodput import Progress
from allstep.runlog import RunRecord, kept, number
from allstep.study.fit import fit
from allstep.study.results import reached

_KINDS = ("updates", "batch")


def find_progress(recipe: str, given: Path | None, goal: float | None) -> Progress:
    """Return what is known about the way to `goal`.

    It is read from `given`, a study folder or a run folder, or else from the studies of the recipe
    in `studies/`. Raise ConfigError if no trial reached the goal.
    """
    if given is not None and (given / "run.jsonl").is_file():
        return _from_noise(given)
    places = [given] if given is not None else _usual_places(recipe)
    found = [each for each in places if (each / "runs").is_dir()]
    if not found:
        raise ConfigError(
            f"--goal: expected a study folder or a run with a noise scale, found none at"
            f" {', '.join(map(str, places))}; `allstep study updates {recipe}` makes one, --study"
            " names another place"
        )
    if goal is None:
        raise ConfigError(f"--study {found[0]}: needs the accuracy to reach: add --goal 0.9")
    return _from_study(found[0], goal)


def _usual_places(recipe: str) -> list[Path]:
    return [Path("studies") / f"{Path(recipe).stem}-{kind}" for kind in _KINDS]


def _from_study(folder: Path, goal: float) -> Progress:
    fewest: dict[int, int] = {}
    best = 0.0
    for record in _records(folder):
        config = record.start.get("config")
        batch = number(config, "batch") if isinstance(config, dict) else None
        if not batch or batch < 1:
            continue
        best = max(best, *(number(each, "accuracy") or 0.0 for each in record.evals), 0.0)
        if (found := reached(record, int(batch), goal)) is not None:
            fewest[int(batch)] = min(found.updates, fewest.get(int(batch), found.updates))
    if not fewest:
        raise ConfigError(
            f"--goal {goal:g}: no trial of {folder} reached it, the best validation accuracy is"
            f" {best:.4g}; give a goal below that"
        )
    curve = fit(list(fewest), list(fewest.values()))
    if curve is None:
        raise ConfigError(
            f"--goal {goal:g}: expected trials with at least 3 batches that reached it, found"
            f" {len(fewest)} in {folder}; give a lower goal, or add batches to the study"
        )
    # A study whose batches are all small, or all large, shows only one of the two limits.
    smin, emin = max(curve.fewest_updates, 1e-6), max(curve.fewest_samples, 1e-6)
    return Progress(smin, emin, f"{folder}, {len(fewest)} batches, rms {curve.rms:.0%}")


def _records(folder: Path) -> Iterator[RunRecord]:
    for file in sorted(folder.glob("runs/*/run.jsonl")):
        try:
            found = runlog.read(file)
        except OSError:
            continue
        if found.starts and kept(found.evals):
            yield found


def _from_noise(folder: Path) -> Progress:
    record = runlog.read(folder / "run.jsonl")
    lines = (*kept(record.steps), *record.events)
    scales = [each for line in lines if (each := number(line, "noise_scale"))]
    positive = [each for each in scales if each > 0]
    if not positive:
        raise ConfigError(
            f"{folder}: has no noise scale; train with noise_scale=true, or give a study with"
            " --study"
        )
    return Progress(1.0, positive[-1], f"noise scale of {folder}", is_ratio=True)
