"""Class folders: `root/class/x.jpg`, one file per sample; the name of the folder is the class.

```
root/                       classes: cat, dog (sorted by name)
  cat/a.jpg                 sample 0, target 0
  cat/more/b.png            sample 1, target 0: subfolders belong to the class, except hidden ones
  dog/c.jpeg                sample 2, target 1
  .allstep-index            paths and classes of all files
```

Listing millions of files takes minutes, so it is done once: the index contains every path, and the
name and modification time of every folder. A file that is added, removed or renamed changes the
time of its folder, and the next opening lists all folders again. A file whose content changes does
not; the content at the time of reading counts. Files have no checksum; `checksum=True` stores a
CRC32C of each in the index, and every read is compared with it, also of a file that was replaced.
`again=True` stores new ones.
"""

import os
import time
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from allstep.data.image.limit import MAX_NBYTES
from allstep.data.sources.checksum import crc32c
from allstep.data.sources.files import Stamp, local_path
from allstep.data.sources.index import (
    Index,
    Progress,
    index_places,
    indexed,
    not_as_stored,
    read_index,
    stored_checksums,
)
from allstep.data.sources.source import BadSample, Place, Sample, Source
from allstep.errors import DataError
from allstep.files.bounded import read_regular

KIND = "folder"
IMAGES = (
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".jp2", ".png", ".webp", ".avif"),
    *(".ppm", ".pgm", ".pbm", ".bmp", ".gif", ".tif", ".tiff"),
)
# Suffixes of files that are usual next to images. Others that are left out may be meant as images.
_NO_IMAGES = (
    *(".txt", ".md", ".html", ".json", ".jsonl", ".csv", ".tsv", ".xml", ".yaml", ".yml", ".log"),
    *(".npy", ".npz", ".mat", ".pkl", ".db", ".ini", ".py", ".sh", ".zip", ".tar", ".gz"),
    ".allstep-index",
)
# Suffixes that a note lists.
_MAX_SUFFIXES = 5
# Files between two calls of a progress function.
_EVERY = 4096
# Nanoseconds: resolution of the file system's clock.
_TICK_NS = 20_000_000


class FolderSource(Source):
    """The images of class folders below `root`: one sample per file, one class per folder.

    `suffixes` are the suffixes of files that are samples, others are left out. `checksum` stores a
    CRC32C of each file that has none yet, `again` new ones for all files. `progress` is called with
    (root, done, total) while the folders are listed.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        suffixes: tuple[str, ...] = IMAGES,
        checksum: bool = False,
        again: bool = False,
        progress: Progress | None = None,
    ) -> None:
        self._root = local_path(root).absolute()
        self._suffixes = tuple(suffix.lower() for suffix in suffixes)
        index = self._index(checksum or again, again, progress)
        self.classes = tuple(index.extra["classes"])
        self._offsets, self._target, self._paths = index["offset"], index["label"], index["paths"]
        self._crcs = index.columns.get("crc")
        self.notes = tuple(left_out_notes(str(root), index.extra.get("left_out")))
        if not len(self):
            raise DataError(
                f"{root}: its {len(self.classes)} class folders contain no images"
                f" ({', '.join(self._suffixes)})"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (str(self._root), self._suffixes, self._fingerprint())

    def __len__(self) -> int:
        return len(self._target)

    def path(self, number: int) -> Path:
        """Return the path of the file of sample `number`."""
        if not 0 <= number < len(self):
            raise IndexError(f"sample {number} of {len(self)}")
        start, end = int(self._offsets[number]), int(self._offsets[number + 1])
        return self._root / os.fsdecode(self._paths[start:end].tobytes())

    def read(self, number: int) -> Sample:
        path = self.path(number)
        try:
            data = read_regular(path, MAX_NBYTES)
        except OSError as error:
            raise BadSample(
                number, Place(str(path)), f"cannot be read: {error.strerror or error}"
            ) from error
        if self._crcs is not None and (found := crc32c(data)) != self._crcs[number]:
            raise BadSample(number, Place(str(path)), not_as_stored(found, int(self._crcs[number])))
        return Sample(data, int(self._target[number]))

    def _bytes_of(self, path: bytes) -> bytes:
        return read_regular(self._root / os.fsdecode(path), MAX_NBYTES)

    def place(self, number: int) -> Place:
        return Place(str(self.path(number)))

    def targets(self) -> NDArray[np.int64]:
        return self._target.astype(np.int64)

    def describe_labels(self) -> str:
        return f"names of folders, numbered by sorted order ({len(self.classes)} classes)"

    def _fingerprint(self) -> tuple[int, int]:
        """Return the number of samples and a checksum of all paths and targets.

        They are equal in two processes in which a sample number means the same file.
        """
        columns = (self._paths, self._offsets.view(np.uint8), self._target.view(np.uint8))
        paths, offsets, targets = map(crc32c, columns)
        return len(self), paths ^ offsets ^ targets

    def _index(self, checksum: bool, again: bool, progress: Progress | None) -> Index:
        """Return the stored index, or a new one."""

        def build() -> Index:
            before = None if again else stored_checksums(self._root, KIND)
            return self._build(checksum, before, progress)

        needs = ("crc",) if checksum else ()
        return indexed(
            self._root, KIND, self._stamp_now, build, needs=needs, again=again, must_write=again
        )

    def _stamp_now(self) -> Stamp:
        """Return the current stamp of the folders that a stored index knows; {} without an index.

        Only the root is listed.
        """
        for place in index_places(self._root):
            if kept := read_index(place, KIND):
                return self._stamp(
                    {name: _changed(self._root / name) for name in kept.stamp.get("folders", ())}
                )
        return {}

    def _stamp(self, folders: dict[str, int]) -> Stamp:
        return {
            "suffixes": list(self._suffixes),
            "classes": _classes(self._root),
            "folders": folders,
        }

    def _build(self, checksum: bool, before: Index | None, progress: Progress | None) -> Index:
        """List all files and return their index; `before` is an earlier one with checksums."""
        folders: dict[str, int] = {}
        paths: list[bytes] = []
        labels: list[int] = []
        classes = _classes(self._root)
        left_out: Counter[str] = Counter()
        for label, name in enumerate(classes):
            listed = _files(self._root, name, self._suffixes, folders, left_out)
            found = sorted(map(os.fsencode, listed))
            paths += found
            labels += [label] * len(found)
            if progress:
                progress(str(self._root), label + 1, len(classes))
        columns: dict[str, NDArray[Any]] = {
            "offset": np.cumsum([0, *map(len, paths)], dtype=np.uint64),
            "label": np.array(labels, np.int32),
            "paths": np.frombuffer(b"".join(paths), np.uint8),
        }
        if checksum or before:
            columns["crc"] = self._checksums(paths, _by_path(before) if before else {}, progress)
        extra = {"classes": classes, "left_out": dict(left_out)}
        return Index(columns, extra, self._stamp(folders))

    def _checksums(
        self, paths: list[bytes], before: dict[bytes, int], progress: Progress | None
    ) -> NDArray[np.uint32]:
        """Return the checksums of all files: stored ones (`before`, by path), else computed now."""
        crcs = np.zeros(len(paths), np.uint32)
        for row, path in enumerate(paths):
            try:
                known = before.get(path)
                crcs[row] = known if known is not None else crc32c(self._bytes_of(path))
            # Reading the sample reports it.
            except OSError:
                pass
            if progress and row % _EVERY == 0:
                progress(str(self._root), row, len(paths))
        return crcs


def _classes(root: Path) -> list[str]:
    """Return the names of the folders in `root`, sorted, without hidden ones."""
    try:
        with os.scandir(root) as entries:
            return sorted(
                entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir()
            )
    except OSError as error:
        # An entry may be the cause: a symbolic link to itself.
        raise DataError(f"{error.filename or root}: {error.strerror or error}") from error


def _files(
    root: Path,
    folder: str,
    suffixes: tuple[str, ...],
    folders: dict[str, int],
    left_out: Counter[str],
) -> Iterator[str]:
    """Yield the paths, relative to `root`, of all images below `folder`.

    Add each folder's modification time, read before it is listed, to `folders`, and the suffixes of
    other files to `left_out`.
    """
    _wait_until_settled(root / folder)
    folders[folder] = _changed(root / folder)
    inside = []
    try:
        with os.scandir(root / folder) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    inside.append(f"{folder}/{entry.name}")
                elif entry.name.lower().endswith(suffixes):
                    yield f"{folder}/{entry.name}"
                elif entry.is_dir():
                    left_out["links to folders"] += 1
                else:
                    left_out[Path(entry.name).suffix.lower()] += 1
    except OSError as error:
        raise DataError(f"{root / folder}: {error.strerror or error}") from error
    for name in inside:
        yield from _files(root, name, suffixes, folders, left_out)


def left_out_notes(root: str, suffixes: Any) -> Iterator[str]:
    """Yield a note for the user on files that may be meant as images but have other suffixes.

    `suffixes` is the number of left-out files by suffix. It comes from an index, which may contain
    anything.
    """
    given = suffixes.items() if isinstance(suffixes, dict) else ()
    counts = Counter(
        {suffix: n for suffix, n in given if suffix not in _NO_IMAGES and isinstance(n, int)}
    )
    if counts:
        frequent = counts.most_common(_MAX_SUFFIXES)
        some = [f"{suffix or 'none'} ({number})" for suffix, number in frequent]
        more = f" and {len(counts) - _MAX_SUFFIXES} more" if len(counts) > _MAX_SUFFIXES else ""
        yield (
            f"{root}: {counts.total()} files are left out, by suffix: {', '.join(some)}{more};"
            f" suffixes of images are {', '.join(IMAGES)}"
        )


def _changed(folder: Path) -> int:
    """Return the modification time of `folder` in nanoseconds; -1 if it does not exist."""
    try:
        return folder.stat().st_mtime_ns
    except OSError:
        return -1


def _wait_until_settled(folder: Path) -> None:
    """Wait until a further change of `folder` would change its modification time.

    Two changes within one tick of the file system's clock have the same time. A folder that was
    listed between them would look unchanged.
    """
    while 0 <= time.time_ns() - _changed(folder) < _TICK_NS:
        time.sleep(0.005)


def _by_path(index: Index) -> dict[bytes, int]:
    """Return the stored checksums by path."""
    paths, spans = index["paths"].tobytes(), pairwise(index["offset"].tolist())
    crcs = index["crc"].tolist()
    return {paths[start:end]: crc for (start, end), crc in zip(spans, crcs, strict=True)}


def _reopen(root: str, suffixes: tuple[str, ...], before: tuple[int, int]) -> FolderSource:
    """Open the folder of a pickled source; raise DataError if its files have changed since."""
    source = FolderSource(root, suffixes=suffixes)
    if (now := source._fingerprint()) != before:
        counts = (
            f"it had {before[0]} images and has {now[0]}"
            if now[0] != before[0]
            else "its files have other names"
        )
        raise DataError(f"{root}: was changed after it was opened: {counts}; start again")
    return source
