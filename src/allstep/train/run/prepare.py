"""Makes sure that a run can run, before anything is started: reads its config, finds its data,
opens it once.

```
prepare    config, its keys fitted together (`config.check`), a named set found or downloaded
           a batch that suits the size of the dataset, where the config names none
check      the data opened as the workers will (`parts`), and held against the config: batch, model,
labels ```

Whatever is wrong ends here, as one line. No torch in here: a launcher can afford it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from allstep import data
from allstep.data.sources.files import is_remote
from allstep.data.sources.synthetic import is_synthetic
from allstep.errors import ConfigError, DataError, did_you_mean
from allstep.models.by_name import check_shape
from allstep.train.config.check import check_batch, check_config
from allstep.train.config.read import names_data, read_config
from allstep.train.config.recipes import DEFAULT, SMALLEST
from allstep.train.config.run_config import DataConfig, RunConfig, usual_batch
from allstep.train.input.open_sources import Progress
from allstep.train.input.splits import Splits, open_splits


@dataclass(frozen=True)
class Prepared:
    """A run that can start. `note` is something the user should know about it."""

    config: RunConfig
    note: str | None = None
    parts: Splits | None = None
    """The data of `config`, where it had to be opened to find the batch."""


def prepare(
    source: str = DEFAULT,
    words: Sequence[str] = (),
    folder: Path | None = None,
    progress: Progress | None = None,
) -> Prepared:
    """Reads the config and finds its data: in `folder`, else where the config says, else in the
    usual places.

    The default recipe, when its data is nowhere, gives way to the smallest one, which needs nothing
    but the package. Who asks for another one means that one.

    A config that names no batch gets one that suits the size of its dataset.
    """
    config = _with_places(read_config(source, words), folder)
    check_config(config)
    try:
        find_data(config, progress)
        return (
            Prepared(config)
            if _names_batch(config)
            else _with_batch(config, source, words, progress)
        )
    except DataError as error:
        if source != DEFAULT or config.data.folder is not None or names_data(source, words):
            raise
        config = read_config(source, words, instead=SMALLEST)
        check_config(config)
        return Prepared(
            config,
            f"training on the {data.named_set(SMALLEST).title} that come with allstep: {error}",
        )


def _names_batch(config: RunConfig) -> bool:
    return config.batch is not None or config.batch_per_worker is not None


def _with_batch(
    config: RunConfig, source: str, words: Sequence[str], progress: Progress | None
) -> Prepared:
    """Open the data to see how large the batch may be; it then counts as if the user had given it."""
    parts = open_splits(config, progress=progress)
    batch = usual_batch(config.optimizer.base_batch, len(parts.train))
    # Read again: a file's learning rate must not be scaled to a batch that the file does not name.
    config = read_config(source, [*words, f"batch={batch}"]).model_copy(
        update={"data": config.data}
    )
    check_config(config)
    return Prepared(config, parts=parts)


def find_data(config: RunConfig, progress: Progress | None = None) -> None:
    """Makes sure that a named set is there, downloaded if need be.

    Data of the user's own is looked at when it is opened.
    """
    if config.data.train is None:
        if config.data.name not in data.NAMED:
            raise ConfigError(
                f"no data set is called {config.data.name!r} (data of your own is named by"
                f" data.train=FOLDER); {did_you_mean(config.data.name, data.NAMED)}"
            )
        data.find(data.named_set(config.data.name), config.data.folder, progress)


def check(prepared: Prepared, num_workers: int = 1, progress: Progress | None = None) -> Splits:
    """Opens the data, so that what is wrong with it is found before workers are; the parts of the
    run."""
    config = prepared.config.resolved(num_workers)
    check_config(config, num_workers)
    parts = prepared.parts or open_splits(config, progress=progress)
    check_batch(config, len(parts.train))
    check_shape(config.model.name, parts.shape, parts.evaluated_shape)
    return parts


def _with_places(config: RunConfig, folder: Path | None) -> RunConfig:
    """The same with places that mean the same in every folder, so that the config can be run from
    elsewhere."""
    section = config.data
    chosen = folder or section.folder
    places = {key: _absolute(getattr(section, key)) for key in ("train", "validation", "test")}
    moved: DataConfig = section.model_copy(
        update={"folder": chosen and chosen.absolute(), **places}
    )
    return config.model_copy(update={"data": moved})


def _absolute(where: int | str | None) -> int | str | None:
    """A path of this machine from its root on; a URL, made-up images and a number as they are."""
    if not isinstance(where, str) or not where or is_remote(where) or is_synthetic(where):
        return where
    return str(Path(where).expanduser().absolute())
