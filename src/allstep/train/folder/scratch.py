"""A folder for files that nobody keeps, made where a run would be: if it cannot be written there,
neither could the run."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from allstep.errors import ConfigError
from allstep.world import World


@contextmanager
def scratch(world: World, near: Path | None = None) -> Iterator[Path]:
    """A folder of rank 0 for as long as it lasts, known to all ranks: in the nearest folder of
    `near` that exists, else where such go."""
    from allstep.comm.group import agree

    made = agree.rank_0_decides(world, lambda: make_scratch(near))
    try:
        yield made
    finally:
        if world.rank == 0:
            shutil.rmtree(made, ignore_errors=True)


def make_scratch(near: Path | None = None) -> Path:
    """A new folder. ConfigError where none can be made, for there no run could be either."""
    place = (
        None if near is None else next(each for each in near.absolute().parents if each.is_dir())
    )
    try:
        return Path(tempfile.mkdtemp(prefix=".allstep-", dir=place))
    except OSError as error:
        raise ConfigError(
            f"{place or 'temporary folder'}: cannot be written: {error.strerror or error}"
        ) from error
