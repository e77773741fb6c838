"""Datasets that are arrays, in memory or mapped: numpy arrays, idx files, CIFAR-10's binary files.

```
ArraySource(data, target)    data (n, height, width[, channels]) or (n, ...); target (n, ...)
IdxSource(images, labels)    the two files of a dataset in MNIST's format, mapped by `idx`
CifarSource(where)           data_batch_1.bin ...: per record one byte of label, then 1,024 red,
                             1,024 green and 1,024 blue bytes
```

All three consist of rows in one or more arrays (parts); a block is one fancy indexing of each part.
CIFAR-10 stores the colors as planes. They are transposed to (height, width, channels) when a block
is built, so that the mapped files are never copied as a whole. None of these formats has checksums:
`index_checksums` (`allstep data index --checksum`) stores a CRC32C per sample next to the file.
From then on every sample is compared with its checksum on reading, also after the file was changed.

If the number of classes is known, a sample with a label outside 0..classes-1 is a BadSample.
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from allstep.data.sources import cifar, idx
from allstep.data.sources.checksum import crc32c
from allstep.data.sources.files import Stamp, check_unchanged, local_path, stamp_of
from allstep.data.sources.index import (
    Index,
    Progress,
    not_as_stored,
    stored_checksums,
    write_somewhere,
)
from allstep.data.sources.shards import Where, list_shards
from allstep.data.sources.source import BadSample, Block, Place, Sample, Source
from allstep.errors import DataError
from allstep.files.bounded import read_regular

KIND = "rows"
_NUM_BATCHES = 5
_BATCH = re.compile(r"data_batch_([1-9][0-9]{0,3})\.bin$")
_MAX_NAMES_NBYTES = 1 << 20
# A label of CIFAR-10's format is one byte.
_MAX_CLASSES = 256


class _Rows(Source):
    """Samples that are the rows of `parts`, one part after the other.

    `names` has the file of each part, or a description of an array, for messages.
    """

    def __init__(
        self,
        parts: list[NDArray[Any]],
        names: list[str],
        target: NDArray[Any],
        classes: tuple[str, ...],
    ) -> None:
        self._parts, self._names, self.target, self.classes = parts, names, target, tuple(classes)
        self._begins = np.cumsum([0, *map(len, parts)])
        self._crcs: NDArray[np.uint32] | None = None
        self._num_classes = len(self.classes)

    def __len__(self) -> int:
        return len(self.target)

    def read(self, number: int) -> Sample:
        part, row = self._locate(number)
        stored = self._parts[part][row]
        target = self.target[number]
        if self._crcs is not None and (found := _crc(stored, target)) != self._crcs[number]:
            raise BadSample(
                number, self.place(number), not_as_stored(found, int(self._crcs[number]))
            )
        if self._has_wrong(target):
            reason = f"its label is {target}, expected 0 to {self._num_classes - 1}"
            raise BadSample(number, self.place(number), reason)
        return Sample(self._images(stored[None])[0], target.item() if target.ndim == 0 else target)

    def block(self, numbers: NDArray[np.int64]) -> Block | None:
        for number in (int(numbers.min()), int(numbers.max())) if len(numbers) else ():
            self._locate(number)
        stored = self._gather(numbers)
        target = self.target[numbers]
        if self._crcs is not None and any(
            map(int.__ne__, map(_crc, stored, target), self._crcs[numbers].tolist())
        ):
            return None
        return None if self._has_wrong(target) else Block(self._images(stored), target)

    def place(self, number: int) -> Place:
        part, row = self._locate(number)
        return Place(self._names[part], self._header + row * self._parts[part][:1].nbytes)

    def targets(self) -> NDArray[np.int64]:
        if self.target.ndim != 1 or self.target.dtype.kind not in "iu":
            return np.full(len(self), -1, np.int64)
        labels = self.target.astype(np.int64)
        return (
            np.where((labels < 0) | (labels >= self._num_classes), -1, labels)
            if self._num_classes
            else labels
        )

    def index_checksums(self, progress: Progress | None = None) -> None:
        """Store a CRC32C of the current content of each sample; for sources that read files."""
        for name, part, begin in zip(
            self._names, self._parts, self._begins[:-1].tolist(), strict=True
        ):
            target = self.target[begin : begin + len(part)]
            index = _crc_index(name, part, target, progress)
            write_somewhere(name, KIND, index, must=True)
        self._use_checksums()

    _header = 0
    """Number of bytes of a file before its first row."""

    def _use_checksums(self) -> None:
        """Use the checksums that `index_checksums` stored, if every part has them."""
        found = [stored_checksums(name, KIND) for name in self._names]
        stored = [index["crc"] for index in found if index]
        if len(stored) == len(self._names):
            self._crcs = np.concatenate(
                [self._fitted(crcs, part) for part, crcs in enumerate(stored)]
            )

    def _fitted(self, crcs: NDArray[np.uint32], part: int) -> NDArray[np.uint32]:
        """Return one checksum per current row of a part.

        Rows that were added after the checksums were stored get that of their current content.
        """
        rows, begin = self._parts[part], int(self._begins[part])
        added = [_crc(rows[row], self.target[begin + row]) for row in range(len(crcs), len(rows))]
        return np.concatenate([crcs[: len(rows)], np.array(added, np.uint32)])

    def _has_wrong(self, target: NDArray[Any]) -> bool:
        """Return whether one of these labels is out of range; False for targets of other kinds."""
        if (
            not self._num_classes
            or self.target.ndim != 1
            or target.dtype.kind not in "iu"
            or not target.size
        ):
            return False
        return bool(target.min() < 0 or target.max() >= self._num_classes)

    def _locate(self, number: int) -> tuple[int, int]:
        """Return the part that contains sample `number`, and the row in it."""
        if not 0 <= number < len(self):
            raise IndexError(f"sample {number} of {len(self)}")
        part = int(np.searchsorted(self._begins, number, "right")) - 1
        return part, number - int(self._begins[part])

    def _gather(self, numbers: NDArray[np.int64]) -> NDArray[Any]:
        """Return the rows of the samples `numbers` as stored, from all parts."""
        if len(self._parts) == 1:
            return np.asarray(self._parts[0][numbers])
        stored = np.empty((len(numbers), *self._parts[0].shape[1:]), self._parts[0].dtype)
        which = np.searchsorted(self._begins, numbers, "right") - 1
        for part in np.unique(which):
            here = which == part
            stored[here] = self._parts[part][numbers[here] - self._begins[part]]
        return stored

    def _images(self, rows: NDArray[Any]) -> NDArray[Any]:
        """Return stored rows in the form in which samples are delivered."""
        return rows


class ArraySource(_Rows):
    """Samples that are the rows of the array `data`; their targets are the rows of `target`.

    `classes` are the names of the classes, in label order; with them, a label outside
    0..len(classes)-1 is a BadSample. `name` describes the array in messages.
    """

    def __init__(
        self, data: Any, target: Any, *, classes: tuple[str, ...] = (), name: str = "an array"
    ) -> None:
        data, target = np.asanyarray(data), np.asanyarray(target)
        if not data.ndim or not target.ndim or len(data) != len(target):
            found = f"data of shape {data.shape} and target of shape {target.shape}"
            raise DataError(f"{name}: expected as many rows of data as of target, found {found}")
        super().__init__([data], [name], target, classes)

    @property
    def data(self) -> NDArray[Any]:
        """Return the array of all samples."""
        return self._parts[0]


class IdxSource(_Rows):
    """The samples of two idx files, `images` and `labels`; `classes` are the names of the classes.

    Plain files are mapped, files that end in `.gz` are unpacked into memory.
    """

    def __init__(
        self, images: str | Path, labels: str | Path, *, classes: tuple[str, ...] = ()
    ) -> None:
        self._pair = (str(images), str(labels))
        self._stamps = [stamp_of(name) for name in self._pair]
        pixels, numbers = idx.read_pair(local_path(images), local_path(labels))
        if numbers.dtype.kind not in "iu":
            raise DataError(f"{labels}: expected labels that are integers, found {numbers.dtype}")
        super().__init__([pixels], [str(images)], numbers.astype(np.int64), classes)
        self._header = 4 + 4 * pixels.ndim
        self._use_checksums()

    def __reduce__(self) -> tuple[Any, ...]:
        return _idx_source, (self._pair, self._stamps, self.classes)

    def _images(self, rows: NDArray[Any]) -> NDArray[Any]:
        # Only elements of more than one byte are copied.
        return rows.astype(rows.dtype.newbyteorder("="), copy=False)


class CifarSource(_Rows):
    """The samples of CIFAR-10's binary files, as its authors publish them.

    `where` is a file, pattern or list of these, or a folder, of which the training files are read.
    `classes` are the names of the classes (default: the lines of `batches.meta.txt` next to the
    first file, if there is one).
    """

    def __init__(self, where: Where, *, classes: tuple[str, ...] | None = None) -> None:
        names = list_shards(where, _is_training_file, "data_batch_*.bin")
        if isinstance(where, str | Path) and local_path(where).is_dir():
            self.notes = _check_batches(where, names)
        self._stamps = [stamp_of(local_path(name)) for name in names]
        parts = [cifar.rows(local_path(name)) for name in names]
        target = np.concatenate([part[:, 0] for part in parts]).astype(np.int64)
        classes = _cifar_classes(names[0]) if classes is None else classes
        super().__init__(parts, names, target, classes)
        self._num_classes = len(self.classes) or cifar.NUM_CLASSES
        self._use_checksums()

    def __reduce__(self) -> tuple[Any, ...]:
        return _cifar_source, (self._names, self._stamps, self.classes)

    def _images(self, rows: NDArray[Any]) -> NDArray[Any]:
        return cifar.images(rows)


def _is_training_file(name: str) -> bool:
    return name.startswith("data_batch") and name.endswith(".bin")


def _check_batches(folder: str | Path, names: Sequence[str]) -> tuple[str, ...]:
    """Return a note for the user if a folder has fewer training files than are published.

    Raise DataError if a file before the last one is missing.
    """
    found = {int(match[1]) for name in names if (match := _BATCH.search(name))}
    missing = sorted(set(range(1, max(found, default=0) + 1)) - found)
    if missing:
        raise DataError(
            f"{folder}: data_batch_{missing[0]}.bin is missing; copy it, or select the other files"
            f" with a pattern: '{folder}/data_batch_*.bin'"
        )
    few = (
        f"{folder}: has {len(found)} of the {_NUM_BATCHES} training files of CIFAR-10 as published"
    )
    return (few,) if 0 < len(found) < _NUM_BATCHES else ()


def _cifar_classes(name: str) -> tuple[str, ...]:
    """Return the names in `batches.meta.txt` next to the file `name`; () if there is no such file.

    The official archive of CIFAR-10 contains it.
    """
    path = local_path(name).with_name("batches.meta.txt")
    try:
        text = read_regular(path, _MAX_NAMES_NBYTES).decode() if os.path.lexists(path) else ""
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path}: expected names of classes in UTF-8, found {error}; remove or correct it"
        ) from error
    if len(names := text.split()) > _MAX_CLASSES:
        raise DataError(
            f"{path}: names {len(names)} classes, expected at most {_MAX_CLASSES}; remove or"
            " correct it"
        )
    return tuple(names)


def _crc(row: NDArray[Any], target: Any) -> int:
    """Return the checksum of a sample: of its stored bytes and of its label.

    The label may be in another file.
    """
    image = np.ascontiguousarray(row).reshape(-1).view(np.uint8)
    return crc32c(image) ^ crc32c(np.asarray(target).tobytes() + b"label")


def _crc_index(
    name: str, part: NDArray[Any], target: NDArray[Any], progress: Progress | None
) -> Index:
    """Return an index with the checksum of each row of a part."""
    crcs, stamp = np.empty(len(part), np.uint32), stamp_of(name)
    for row, stored in enumerate(part):
        crcs[row] = _crc(stored, target[row])
        if progress and (row + 1) % 4096 == 0:
            progress(name, row + 1, len(part))
    if progress:
        progress(name, len(part), len(part))
    return Index({"crc": crcs}, stamp=stamp)


def _idx_source(pair: tuple[str, str], stamps: list[Stamp], classes: tuple[str, ...]) -> IdxSource:
    """Open the files of a pickled source; raise DataError if one was changed since."""
    source = IdxSource(*pair, classes=classes)
    check_unchanged(pair, stamps, source._stamps)
    return source


def _cifar_source(names: list[str], stamps: list[Stamp], classes: tuple[str, ...]) -> CifarSource:
    """Open the files of a pickled source; raise DataError if one was changed since."""
    source = CifarSource(names, classes=classes)
    check_unchanged(names, stamps, source._stamps)
    return source
