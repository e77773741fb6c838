"""A trial that is a run of `allstep train` with one worker."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from allstep.errors import ConfigError
from allstep.process.python import run_module
from allstep.study.trial import FOLDER, Trial
from allstep.train.config.check import check_batch, check_config
from allstep.train.config.read_config import read_config
from allstep.train.config.run_config import RunConfig
from allstep.train.run.prepare import Prepared, check, prepare
from allstep.world import NONE

_EPOCH_SECONDS = 10.0  # a first guess; the forecast measures
# a step costs as much as the arithmetic of so many samples, whatever the batch; a first guess, too
_STEP_SAMPLES = 16.0


def training(name: str, recipe: str, words: Sequence[str], facts: Mapping[str, Any]) -> Trial:
    """The run of `recipe` with `words` on top.

    A config that cannot be right is an error here, before anything runs.
    """
    config = read_config(recipe, words).resolved(1)
    try:
        check_config(config, 1)
    except ConfigError as error:
        raise ConfigError(f"run {name}: {error}") from error
    command = tuple(run_module("allstep", "train", recipe, "--workers", "1", "--launcher", NONE))
    return Trial(
        name=name,
        command=(*command, "--out", FOLDER, *words),
        resume=("--resume", "auto"),
        seconds=config.num_epochs * _EPOCH_SECONDS * (1 + _STEP_SAMPLES / config.batch),
        epochs=config.num_epochs,
        settings=_digest(config),
        facts=facts,
    )


def _digest(config: RunConfig) -> str:
    """Of the whole config, whoever wrote it: a recipe that has changed since makes other runs.

    Where the data lies does not count.
    """
    plain = config.model_dump_json(exclude={"data": {"folder"}})
    return hashlib.sha256(plain.encode()).hexdigest()[:16]


def found(
    recipe: str, words: Sequence[str], data: Path | None = None
) -> tuple[RunConfig, list[str]]:
    """The config of the recipe, its data found, and words that say where: no run may fall back on
    other data than the rest."""
    config = read_config(recipe, words)
    named = [f"data.name={config.data.name}", *([f"data.folder={data.absolute()}"] if data else [])]
    return prepare(recipe, [*words, *named], None).config, named


def check_data(config: RunConfig, batches: Sequence[int]) -> None:
    """Opens the data once, as every run will: what is wrong with it, or too large a batch, is an
    error before anything runs."""
    smallest, largest = (
        config.model_copy(update={"batch": b, "batch_per_worker": None})
        for b in (batches[0], batches[-1])
    )
    check_batch(largest.resolved(1), len(check(Prepared(smallest)).train))


def refuse_words(words: Sequence[str], own: Mapping[str, str]) -> None:
    """ConfigError for a key that the study itself sets in each run: it would be of no effect. own:
    what to give instead, by key."""
    for word in words:
        key = word.partition("=")[0]
        if key in own:
            raise ConfigError(f"{word}: the study sets {key} in each run; {own[key]}")
