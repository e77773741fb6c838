"""A temporary folder on the file system of the run folder.

If it cannot be written, the run folder could not be written either.
"""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from allstep.errors import ConfigError
from allstep.world import World


@contextmanager
def scratch(world: World, near: Path | None = None) -> Iterator[Path]:
    """Provide a temporary folder of rank 0 within the context, with the same path on all ranks.

    It is made in the nearest existing parent of `near` (default: the system's temporary folder).
    """
    from allstep.comm.group import agree

    made = agree.rank_0_decides(world, lambda: make_scratch(near))
    try:
        yield made
    finally:
        if world.rank == 0:
            shutil.rmtree(made, ignore_errors=True)


def make_scratch(near: Path | None = None) -> Path:
    """Create and return a temporary folder; see `scratch` for `near`.

    Raise ConfigError if that is not possible, because a run folder could not be made there either.
    """
    place = (
        None if near is None else next(each for each in near.absolute().parents if each.is_dir())
    )
    try:
        return Path(tempfile.mkdtemp(prefix=".allstep-", dir=place))
    except OSError as error:
        raise ConfigError(
            f"{place or 'temporary folder'}: cannot be written: {error.strerror or error}"
        ) from error
