"""Check that a run can start, before workers are started.

```
prepare    reads the config, checks that its keys fit together (`config.check`), finds or downloads
           a named dataset, and chooses a batch by the size of the dataset if the config has none
check      opens the data as the workers will (`Splits`), and compares it with the config: batch,
           model, labels
```

Any problem ends the command here, with one line. The module does not import torch, so that the
launcher can use it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from allstep import data
from allstep.data.sources.open_file import is_remote
from allstep.data.sources.synthetic import is_synthetic
from allstep.errors import ConfigError, DataError, did_you_mean
from allstep.files.home import expand_home
from allstep.models.by_name import check_shape
from allstep.train.config.check_config import check_batch, check_config
from allstep.train.config.data_config import DataConfig
from allstep.train.config.read_config import names_data, read_config
from allstep.train.config.recipes import DEFAULT, SMALLEST
from allstep.train.config.run_config import RunConfig
from allstep.train.config.usual_batch import usual_batch
from allstep.train.input.open_sources import Progress
from allstep.train.input.splits import Splits, open_splits


@dataclass(frozen=True)
class Prepared:
    """A run that can start."""

    config: RunConfig
    note: str | None = None
    """A note for the user about the run."""
    splits: Splits | None = None
    """The data of `config`, if it had to be opened to choose the batch."""


def prepare(
    source: str = DEFAULT,
    overrides: Sequence[str] = (),
    folder: Path | None = None,
    progress: Progress | None = None,
) -> Prepared:
    """Read a config and find its data. Raise ConfigError or DataError if the run cannot start.

    `source` and `overrides` are those of `read_config`. The data is searched in `folder`, else in
    the config's folder, else in the usual places; `progress` receives the progress of a download.

    If the data of the default recipe is not found, the smallest recipe is used, which needs only
    the package. A recipe that the user names is never replaced. A config without a batch gets one
    that fits the size of its dataset.
    """
    config = _with_places(read_config(source, overrides), folder)
    check_config(config)
    try:
        find_data(config, progress)
        if _names_batch(config):
            return Prepared(config)
        return _with_batch(config, source, overrides, progress)
    except DataError as error:
        if source != DEFAULT or config.data.folder is not None or names_data(source, overrides):
            raise
        config = read_config(source, overrides, instead=SMALLEST)
        check_config(config)
        return Prepared(
            config,
            f"training on the {data.named_set(SMALLEST).title} that come with allstep: {error}",
        )


def _names_batch(config: RunConfig) -> bool:
    return config.batch is not None or config.batch_per_worker is not None


def _with_batch(
    config: RunConfig, source: str, overrides: Sequence[str], progress: Progress | None
) -> Prepared:
    """Open the data and choose the batch by its size, as if the user had set it."""
    splits = open_splits(config, progress=progress)
    batch = usual_batch(config.optimizer.base_batch, len(splits.train))
    # Read again: a file's learning rate must not be scaled to a batch that the file does not name.
    config = read_config(source, [*overrides, f"batch={batch}"]).model_copy(
        update={"data": config.data}
    )
    check_config(config)
    return Prepared(config, splits=splits)


def find_data(config: RunConfig, progress: Progress | None = None) -> None:
    """Find the files of a named dataset, or download them. Raise DataError if that fails.

    Data of the user's own is checked when it is opened.
    """
    if config.data.train is None:
        if config.data.name not in data.NAMED:
            raise ConfigError(
                f"no dataset is called {config.data.name!r} (for data of your own set"
                f" data.train=FOLDER); {did_you_mean(config.data.name, data.NAMED)}"
            )
        data.find(data.named_set(config.data.name), config.data.folder, progress)


def check(prepared: Prepared, num_workers: int = 1, progress: Progress | None = None) -> Splits:
    """Open the data and check it, before workers start. Return the splits of the run."""
    config = prepared.config.resolved(num_workers)
    check_config(config, num_workers)
    splits = prepared.splits or open_splits(config, progress=progress)
    check_batch(config, len(splits.train))
    check_shape(config.model.name, splits.shape, splits.evaluated_shape)
    return splits


def _with_places(config: RunConfig, folder: Path | None) -> RunConfig:
    """Return the config with absolute paths, so that the run can be repeated from any folder."""
    section = config.data
    chosen = folder or section.folder
    places = {key: _absolute(getattr(section, key)) for key in ("train", "validation", "test")}
    moved: DataConfig = section.model_copy(
        update={"folder": chosen and chosen.absolute(), **places}
    )
    return config.model_copy(update={"data": moved})


def _absolute(where: int | str | None) -> int | str | None:
    """Return a path as an absolute one; a URL, "synthetic:..." and a number unchanged."""
    if not isinstance(where, str) or not where or is_remote(where) or is_synthetic(where):
        return where
    return str(expand_home(where).absolute())
