"""CIFAR-10's official binary format: rows of equal length, no header.

```
byte 0          the label, 0..9
1 .. 1024       red, 32 rows of 32
1025 .. 2048    green
2049 .. 3072    blue
```

A file is a whole number of such rows, so only its length and labels can be checked here.
`data.sets.catalogue` has the SHA-256 of the published files.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from allstep.data.sources.files import LocalFile
from allstep.errors import DataError

SIDE = 32
IMAGE = 3 * SIDE * SIDE
ROW = 1 + IMAGE
NUM_CLASSES = 10


def rows(path: Path) -> NDArray[np.uint8]:
    """Return the rows (n, 3073) of one file, memory-mapped."""
    file = LocalFile(path)
    if not file.size or file.size % ROW:
        raise DataError(
            f"{path}: expected rows of {ROW} bytes, found {file.size} bytes: {file.size / ROW:.2f}"
            " rows"
        )
    return np.frombuffer(file.view, np.uint8).reshape(-1, ROW)


def images(rows: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the images of `rows` as (n, height, width, channels), contiguous."""
    planes = rows[:, 1:].reshape(len(rows), 3, SIDE, SIDE)
    return np.ascontiguousarray(planes.transpose(0, 2, 3, 1))


def read(paths: Sequence[Path]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Read all images (n, 32, 32, 3) and labels (n,) of some files into memory, in file order."""
    parts = [rows(path) for path in paths]
    labels = [_labels(path, part) for path, part in zip(paths, parts, strict=True)]
    return np.concatenate([images(part) for part in parts]), np.concatenate(labels)


def _labels(path: Path, rows: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Return the labels of `rows`; raise DataError if one is out of range."""
    labels = rows[:, 0].astype(np.int64)
    if labels.max() >= NUM_CLASSES:
        row = int(labels.argmax())
        raise DataError(
            f"{path}: expected labels 0 to {NUM_CLASSES - 1}, found {labels[row]} in row {row}"
        )
    return labels
