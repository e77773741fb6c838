"""Makes sure that a run can run, before anything is started: reads its config, finds its data and reads that once.

Whatever is wrong ends here, as one line. No torch in here: a launcher can afford it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from allstep import data
from allstep.data import order
from allstep.data.sets.fetch import Progress
from allstep.errors import ConfigError, DataError
from allstep.train.config import RunConfig
from allstep.train.recipes import DEFAULT, SMALLEST
from allstep.train.source import names_data, read_config


@dataclass(frozen=True)
class Prepared:
    """A run that can start. `note` is something the user should know about it."""

    config: RunConfig
    found: data.Found
    note: str | None = None


def prepare(
    source: str = DEFAULT, words: Sequence[str] = (), folder: Path | None = None, progress: Progress | None = None
) -> Prepared:
    """Reads the config and finds its data: in `folder`, else where the config says, else in the usual places.

    A recipe whose data is nowhere gives way to the smallest one, which needs nothing but the package.
    """
    config = _with_folder(read_config(source, words), folder)
    try:
        return Prepared(config, find_data(config, progress))
    except DataError as error:
        if config.data.folder is not None or names_data(source, words):
            raise
        config = read_config(source, words, instead=SMALLEST)
        note = f"training on the {data.named_set(SMALLEST).title} that come with allstep: {error}"
        return Prepared(config, find_data(config), note)


def find_data(config: RunConfig, progress: Progress | None = None) -> data.Found:
    """Where the data of `config` is."""
    return data.find(data.named_set(config.data.name), config.data.folder, progress)


def num_validation(config: RunConfig, num_train: int) -> int:
    """How many of `num_train` samples are held out."""
    asked = config.data.validation
    if asked is not None and not 1 <= asked < num_train:
        raise ConfigError(
            f"config key 'data.validation': expected 1 to {num_train - 1} of {num_train} samples, found {asked}"
        )
    return asked or max(1, order.default_validation(num_train))


def check(prepared: Prepared) -> None:
    """Reads all of the data, so that a damaged file is found before workers are."""
    images = data.load(prepared.found)
    num_validation(prepared.config, len(images.train))


def _with_folder(config: RunConfig, folder: Path | None) -> RunConfig:
    chosen = folder or config.data.folder
    section = config.data.model_copy(update={"folder": chosen and chosen.absolute()})
    return config.model_copy(update={"data": section})
