"""Holding out samples of the training data for the validation and the test split.

The samples are chosen by `data.split_seed` alone: first those of the test split, then those of the
validation split, each by a permutation of its own, so no sample is in two splits. `data.use` then
takes a part of what is left for training, so that runs with different parts have the same
validation and test split.
"""

from typing import NamedTuple

import numpy as np

from allstep.data import order
from allstep.data.sources.source import Source
from allstep.errors import ConfigError, DataError
from allstep.train.config.data_config import DataConfig
from allstep.train.config.part_of_data import num_in_part, parse_part
from allstep.train.input.open_sources import Sources


class Selection(NamedTuple):
    """The samples of one split."""

    source: Source
    numbers: order.Numbers | None = None
    """Numbers of the samples in the source; None for all."""

    @property
    def num_samples(self) -> int:
        """Number of samples of the split."""
        return len(self.source) if self.numbers is None else len(self.numbers)


def use_part(section: DataConfig, train: Selection) -> Selection:
    """Return the training samples that `data.use` names; raise ConfigError for too many or none."""
    if section.use is None:
        return train
    n = train.num_samples
    count = num_in_part(parse_part(section.use), n)
    if not 1 <= count <= n:
        raise ConfigError(
            f"config key 'data.use': expected 1 to {n} training samples, or a fraction that has at"
            f" least one, found {section.use} ({count} samples)"
        )
    if count == n:
        return train
    places = order.some_first(count, n, section.split_seed)
    return train._replace(numbers=places if train.numbers is None else train.numbers[places])


def hold_out(section: DataConfig, sources: Sources) -> list[Selection]:
    """Return the samples of training, validation and test, whatever `data.use` is."""
    train, test = _hold_out_test(section, sources)
    if sources.validation is not None:
        return [train, Selection(sources.validation), test]
    n, seed, numbers = len(sources.train), section.split_seed, train.numbers
    left = train.num_samples
    count = num_held_out("validation", section.validation, left, n)
    kept = order.kept(np.arange(left - count), left, count, seed)
    held_out = order.held_out(left, count, seed)
    if numbers is not None:
        kept, held_out = numbers[kept], numbers[held_out]
    return [Selection(sources.train, kept), Selection(sources.train, np.sort(held_out)), test]


def _hold_out_test(section: DataConfig, sources: Sources) -> tuple[Selection, Selection]:
    """Return the training samples without those of the test split, and the test samples."""
    if sources.test is not None:
        return Selection(sources.train), Selection(sources.test)
    n = len(sources.train)
    asked = section.test if section.test is not None else section.validation
    count = num_held_out("test", asked, n)
    shuffled = order.permute(np.arange(n), n, "test", section.split_seed)
    kept, held_out = shuffled[: n - count], shuffled[n - count :]
    return Selection(sources.train, kept), Selection(sources.train, np.sort(held_out))


def num_held_out(key: str, asked: int | str | None, n: int, whole: int | None = None) -> int:
    """Return how many of `n` samples are held out for the split `key`.

    `asked` is the config's value; a number counts. Without one, the default for a dataset of
    `whole` samples (default: n) applies. Raise an error unless at least one sample is left on
    either side.
    """
    if isinstance(asked, str) or asked is None:
        asked = max(1, order.default_validation(whole or n))
        if n < 2:
            raise DataError(
                f"{n} sample is too few to hold out a split for data.{key}: there must be at least"
                " 2, better hundreds"
            )
    if not 1 <= asked < n:
        raise ConfigError(
            f"config key 'data.{key}': expected 1 to {n - 1} of {n} samples, found {asked}"
        )
    return asked
