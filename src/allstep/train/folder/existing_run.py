"""An existing run: its config, and a request to evaluate its weights.

This module needs no torch, so a launcher can import it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from allstep.errors import ConfigError
from allstep.train.config.read_config import read_config
from allstep.train.config.run_config import RunConfig
from allstep.train.config.trust import TRUST, check_factory

Which = Literal["last", "best"]
SplitName = Literal["test", "validation", "train"]
_FIXED_KEYS = ("data.mean", "data.std", "data.augment", "data.mix")


@dataclass(frozen=True)
class Evaluation:
    """A request: which weights of a run to evaluate, on which samples."""

    folder: Path
    """Run folder."""
    split: SplitName = "test"
    """Split to evaluate."""
    which: Which | None = None
    """Weights to evaluate; None for those that the run itself would test."""
    place: str | None = None
    """Place of other data than the run's, all of which is evaluated; None for the run's."""
    overrides: Sequence[str] = ()
    """Changes of the config as "key=value", only of keys in `data`."""
    device: str = "auto"
    trust: bool = False
    """Execute the model code that the run folder names, even without a proof of its origin."""
    num_samples: int | None = None
    """Size of a fixed subset, chosen by `data.split_seed`, to evaluate; None for all samples."""

    def config(self) -> RunConfig:
        """Return the run's config with the changes.

        Raise ConfigError if there is no run, or if a change does not fit a trained model.
        """
        for override in self.overrides:
            key = override.partition("=")[0]
            if not key.startswith("data."):
                raise ConfigError(
                    f"{override}: the config of a trained run is fixed; only keys of data can be"
                    " set here, such as data.test=FOLDER"
                )
            if key in _FIXED_KEYS:
                raise ConfigError(
                    f"{override}: the model was trained with the run's {key}, which cannot be set"
                    " here"
                )
        return run_config(self.folder, self.overrides, self.trust)


def run_config(folder: Path, overrides: Sequence[str] = (), trust: bool = False) -> RunConfig:
    """Return the config of the run in `folder`, with `overrides` ("key=value") on top.

    `trust` accepts a model of another user's code; see `train.config.trust`.
    """
    file = folder / "config.yaml"
    if not file.is_file():
        raise ConfigError(
            f"{folder}: {_what_is_wrong(folder)}; expected a run folder of `allstep train`"
        )
    config = read_config(str(file), [*overrides, f"{TRUST}=true"] if trust else overrides)
    if not trust:
        # Check it also if the folder has no file yet that marks it as a run folder.
        check_factory(file, config.model)
    return config


def _what_is_wrong(folder: Path) -> str:
    """Return why `folder` is not a run folder."""
    if folder.is_dir():
        return "holds no run: it has no config.yaml"
    return "is a file" if folder.exists() else "there is no such folder"
