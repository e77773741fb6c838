"""Open the dataset that SRC of `allstep data` names.

SRC is anything that `allstep.data.open_source` accepts (a folder of classes, of TFRecord or tar
shards or of idx files, a single file, a pattern, a URL, synthetic images such as
synthetic:1000x224x224), or the name of a dataset that `allstep data get` knows.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from allstep.console.escape import print_notice
from allstep.console.progress_bar import file_bars

if TYPE_CHECKING:
    from allstep.data.sources.source import Source


@contextmanager
def opened(src: str, test: bool = False, labels_from: int | None = None) -> "Iterator[Source]":
    """Open the source, print its notes, and close it at the end.

    Missing indexes are built now, with a progress bar. `test` selects the test split,
    `labels_from` is the smallest label. Raise DataError if the source has no samples.
    """
    from allstep.console.progress_bar import bar
    from allstep.data.opening import open_source
    from allstep.errors import DataError

    place, classes = _find(src)
    with bar("indexing", "bytes") as shown:
        source = open_source(
            place,
            train=not test,
            labels_from=labels_from,
            progress=lambda name, done, total: shown(done, total, Path(name).name),
        )
    source.classes = source.classes or classes
    try:
        if not len(source):
            raise DataError(f"{src}: is empty: expected samples, found none; give another place")
        for note in source.notes:
            print_notice(note)
        yield source
    finally:
        source.close()


def _find(src: str) -> tuple[str, tuple[str, ...]]:
    """Return the place of `src`, and the class names of a dataset that is known by name.

    A file or folder with that name takes precedence over the known dataset.
    """
    from allstep.data.sets.catalogue import NAMED
    from allstep.data.sets.load import find

    if src not in NAMED or Path(src).exists():
        return src, ()
    with file_bars() as progress:
        found = find(NAMED[src], progress=progress)
    return str(found.folder), found.classes


def absolute(src: str) -> str:
    """Return the place of `src` as an absolute path; URLs and synthetic images stay as they are."""
    from allstep.data.sources.synthetic import is_synthetic

    place, _ = _find(src)
    return place if "://" in place or is_synthetic(place) else str(Path(place).absolute())


def check_outside(src: str, dst: Path) -> None:
    """Raise ConfigError if `dst` is inside the folder `src`.

    An output there would be read as part of the dataset next time, or replace a sample.
    """
    from allstep.errors import ConfigError

    if not src or not Path(src).is_dir():
        return
    if dst.absolute().resolve().is_relative_to(Path(src).absolute().resolve()):
        raise ConfigError(f"{dst} is inside {src}; write into another folder")
