"""A run that is there already: its config, read back, and what somebody may want of it.

No torch in here: a launcher can afford it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from allstep.errors import ConfigError
from allstep.train.config.read import read_config
from allstep.train.config.run_config import RunConfig
from allstep.train.config.trust import TRUST, check_factory

Which = Literal["last", "best"]
SplitName = Literal["test", "validation", "train"]
_FIXED = ("data.mean", "data.std", "data.augment", "data.mix")


@dataclass(frozen=True)
class Evaluation:
    """Which weights of a run shall be evaluated, on which samples."""

    folder: Path
    """Of the run."""
    split: SplitName = "test"
    which: Which | None = None
    """None: those that the run itself would test."""
    place: str | None = None
    """Of other data than the run's; all of it counts then."""
    words: Sequence[str] = ()
    """ "key=value", of the keys of data."""
    device: str = "auto"
    trust: bool = False
    """Execute the model code that the run folder names, also without a proof of its origin."""

    def config(self) -> RunConfig:
        """The run's config with the words on top.

        ConfigError when there is no run, or a word that would make it another one.
        """
        for word in self.words:
            key = word.partition("=")[0]
            if not key.startswith("data."):
                raise ConfigError(
                    f"{word}: the run is what it is; only keys of its data can be set here, such as"
                    " data.test=FOLDER"
                )
            if key in _FIXED:
                raise ConfigError(
                    f"{word}: the net was trained with what the run says, so {key} cannot be set"
                    " here"
                )
        return run_config(self.folder, self.words, self.trust)


def run_config(folder: Path, words: Sequence[str] = (), trust: bool = False) -> RunConfig:
    """The config of the run in `folder`, with `words` ("key=value") on top.

    trust: accept a model of another person's code; see `train.config.trust`.
    """
    file = folder / "config.yaml"
    if not file.is_file():
        raise ConfigError(
            f"{folder}: {_what_is_wrong(folder)}; expected a run folder, as `allstep train`"
            " makes it"
        )
    config = read_config(str(file), [*words, f"{TRUST}=true"] if trust else words)
    if not trust:
        # Also where the folder has nothing yet that would mark it as a run's.
        check_factory(file, config.model)
    return config


def _what_is_wrong(folder: Path) -> str:
    if folder.is_dir():
        return "holds no run, there is no config.yaml in it"
    return "is a file" if folder.exists() else "there is no such folder"
