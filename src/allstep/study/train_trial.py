"""A trial that is a run of `allstep train`, with one worker or several on this host."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from allstep.errors import ConfigError
from allstep.process.python import run_module
from allstep.study.trial import FOLDER, Trial
from allstep.train.config.check_config import check_batch, check_config
from allstep.train.config.read_config import read_config
from allstep.train.config.run_config import RunConfig
from allstep.train.run.prepare import Prepared, check, prepare
from allstep.world import NONE

# a first guess; the forecast replaces it by measurements
_EPOCH_SECONDS = 10.0
# fixed cost of a step, in samples, also a first guess
_STEP_SAMPLES = 16.0


def training(
    name: str,
    recipe: str,
    overrides: Sequence[str],
    facts: Mapping[str, Any],
    num_workers: int = 1,
    options: Sequence[str] = (),
) -> Trial:
    """Return the trial that trains `recipe` with `overrides` (key=value).

    options: further ones of `allstep train`, such as faults. Raise ConfigError for a config that
    cannot be right, before any trial runs.
    """
    config = read_config(recipe, overrides).resolved(num_workers)
    try:
        check_config(config, num_workers)
    except ConfigError as error:
        raise ConfigError(f"run {name}: {error}") from error
    count = ("--workers", str(num_workers), "--launcher", NONE)
    command = tuple(run_module("allstep", "train", recipe, *count))
    return Trial(
        name=name,
        command=(*command, *options, "--out", FOLDER, *overrides),
        resume=("--resume", "auto"),
        seconds=config.num_epochs * _EPOCH_SECONDS * (1 + _STEP_SAMPLES / config.batch),
        epochs=config.num_epochs,
        settings=_digest(config, num_workers, options),
        cores=num_workers,
        facts=facts,
    )


def _digest(config: RunConfig, num_workers: int, options: Sequence[str]) -> str:
    """Return a digest of the whole config, except the folder of the data, workers and options.

    So a run with a recipe that has changed since is not taken for the same run.
    """
    plain = config.model_dump_json(exclude={"data": {"folder"}})
    # Folders of older versions have runs with one worker and no options.
    if num_workers > 1 or options:
        plain += f" {num_workers} {' '.join(options)}"
    return hashlib.sha256(plain.encode()).hexdigest()[:16]


def found(
    recipe: str, overrides: Sequence[str], data: Path | None = None
) -> tuple[RunConfig, list[str]]:
    """Return the config of `recipe`, its data located, and key=value arguments that name the data.

    With these arguments no run can fall back on other data than the rest. `data` is the folder of
    the data (default: as for `allstep train`).
    """
    config = read_config(recipe, overrides)
    named = [f"data.name={config.data.name}", *([f"data.folder={data.absolute()}"] if data else [])]
    return prepare(recipe, [*overrides, *named], None).config, named


def check_data(config: RunConfig, batches: Sequence[int]) -> int:
    """Open the data once, as every run will, and return the number of training samples.

    Raise an error for bad data or too large a batch. `batches` are those of the study in rising
    order.
    """
    smallest, largest = (
        config.model_copy(update={"batch": b, "batch_per_worker": None})
        for b in (batches[0], batches[-1])
    )
    num_train = len(check(Prepared(smallest)).train)
    check_batch(largest.resolved(1), num_train)
    return num_train


def num_training_samples(config: RunConfig) -> int:
    """Open the data, as every run will, and return its training samples, without `data.use`.

    Raise an error for bad data, or for a batch that is too large for it.
    """
    section = config.data.model_copy(update={"use": None})
    return len(check(Prepared(config.model_copy(update={"data": section}))).train)


def refuse_overrides(overrides: Sequence[str], own: Mapping[str, str]) -> None:
    """Raise ConfigError for a key that the study itself sets in each run: it would have no effect.

    `own` has what to give instead, by key.
    """
    for override in overrides:
        key = override.partition("=")[0]
        if key in own:
            raise ConfigError(f"{override}: the study sets {key} in each run; {own[key]}")
