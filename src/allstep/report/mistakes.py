"""What the last evaluation left in `mistakes/`, so that a report needs no data.

```
mistakes/
  mistakes.json     [{"file": "0001.png", "label": "shirt", "predicted": "coat", "probability": 0.98, "number": 4711}, ...]
  0001.png          the image, the worst mistake first
  confusion.json    {"classes": ["shirt", "coat"], "counts": [[95, 5], [7, 93]]}    counts[label][predicted]
```

Labels are names, or numbers of classes in confusion.json. An image is taken over byte by byte; one
that is not a PNG in that folder, or that would make the page large, is left out.
"""

import base64
import heapq
import io
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allstep.files.bounded import MAX_JSON, read_json, read_regular

_SHOWN = 24
_LARGEST = 40_000  # bytes of one image, so that all of them stay below a megabyte
_PNG = b"\x89PNG\r\n\x1a\n"
_MOST_CLASSES = 2000
_LARGEST_MATRIX = 32 << 20
"""Bytes of confusion.json: eight for each count of 2,000 classes. Two or three are usual."""
_LARGEST_COUNT = 1 << 64
_MOST_PIXELS = 1 << 22
"""Of an image that is decoded: 40,000 bytes may be an image of 80 million pixels."""
_SMALL = 64  # pixels; smaller images are shown with hard edges
_DARK = 64  # levels; an image without higher ones looks black


@dataclass(frozen=True)
class Mistake:
    """One image that the model took for something else."""

    source: str
    """The image, as a data: address."""
    width: int
    height: int
    label: str
    predicted: str
    probability: float | None
    """What the model gave to `predicted`."""
    number: int | None
    """Of the sample."""
    brightness: float = 1.0
    """How many times brighter it must be shown to be seen: the levels of the 8x8 digits go from 0
    to 16, not to 255."""

    @property
    def is_small(self) -> bool:
        return max(self.width, self.height) < _SMALL


@dataclass(frozen=True)
class Confusion:
    """How often each class was taken for which: counts[label][predicted]."""

    classes: tuple[str, ...]
    counts: tuple[tuple[int, ...], ...]

    @property
    def total(self) -> int:
        return sum(map(sum, self.counts))

    def worst(self, number: int) -> list[tuple[str, str, int, float]]:
        """The most frequent confusions: label, predicted, how often, and the share of the label's
        samples."""
        most = heapq.nlargest(number, self._wrong(), key=lambda found: found[0])
        names, counts = self.classes, self.counts
        return [(names[i], names[j], count, count / sum(counts[i])) for count, i, j in most]

    def _wrong(self) -> Iterator[tuple[int, int, int]]:
        """Yield (count, label, predicted) of every confusion, of which there may be millions."""
        for i, row in enumerate(self.counts):
            for j, count in enumerate(row):
                if count and i != j:
                    yield count, i, j


def read_confusion(folder: Path, notes: list[str]) -> Confusion | None:
    """The matrix in `folder`, if there is one that fits its classes."""
    content = _read(folder / "confusion.json", notes, _LARGEST_MATRIX)
    if content is None:
        return None
    try:
        # Counted before a table is built from them.
        num_classes = max(len(content["classes"]), len(content["counts"]))
        if num_classes > _MOST_CLASSES:
            notes.append(_beyond(num_classes))
            return None
        classes = tuple(map(str, content["classes"]))
        counts = tuple(tuple(map(int, row)) for row in content["counts"])
    except (TypeError, KeyError, ValueError):
        classes, counts = (), ()
    if not classes or not _fits(counts, len(classes)):
        notes.append(
            "mistakes/confusion.json: expected `classes` and a square of `counts`; it was left out"
        )
        return None
    return Confusion(classes, counts)


def _fits(counts: Sequence[Sequence[int]], num_classes: int) -> bool:
    """Whether the counts are a square of numbers that a sample count can be."""
    # int() also takes text: of 4,300 digits, and Python refuses to print the sum of two such.
    return [len(row) for row in counts] == [num_classes] * num_classes and all(
        min(row) >= 0 and max(row) < _LARGEST_COUNT for row in counts
    )


def _beyond(num_classes: int) -> str:
    found = f"has {num_classes:,} classes, the most is {_MOST_CLASSES:,}"
    return f"mistakes/confusion.json: {found}; it was left out"


def read_mistakes(
    folder: Path,
    notes: list[str],
    classes: Sequence[str] = (),
) -> tuple[Mistake, ...]:
    """The worst mistakes in `folder` that can be shown.

    classes: the names that labels of entries may be numbers of.
    """
    entries = _read(folder / "mistakes.json", notes)
    if not isinstance(entries, list):
        return ()
    found = [_mistake(folder, entry, classes) for entry in entries[:_SHOWN]]
    if missing := found.count(None):
        notes.append(
            f"mistakes/: {missing} of {len(found)} images are missing, no PNG, or over"
            f" {_LARGEST:,} bytes"
        )
    return tuple(mistake for mistake in found if mistake is not None)


def _mistake(folder: Path, entry: Any, classes: Sequence[str]) -> Mistake | None:
    if not isinstance(entry, Mapping):
        return None
    image = _image(folder, str(entry.get("file")))
    if image is None:
        return None
    probability, number = entry.get("probability"), entry.get("number")
    return Mistake(
        source="data:image/png;base64," + base64.b64encode(image).decode(),
        width=int.from_bytes(image[16:20], "big"),
        height=int.from_bytes(image[20:24], "big"),
        label=_class(entry.get("label"), classes),
        predicted=_class(entry.get("predicted"), classes),
        probability=float(probability) if isinstance(probability, int | float) else None,
        number=number if isinstance(number, int) else None,
        brightness=_brightness(image),
    )


def _brightness(code: bytes) -> float:
    """255 over the highest level of an image that is dark all over; 1 for others, and for what
    cannot be decoded."""
    import numpy as np  # only runs with mistakes wait for these
    from PIL import Image

    try:
        with warnings.catch_warnings(action="error"), Image.open(io.BytesIO(code)) as image:
            if image.width * image.height > _MOST_PIXELS:
                return 1.0
            highest = int(np.asarray(image.convert("L")).max())
    except Exception:
        # Errors of Pillow for damaged files are of any kind: IndexError for an empty iCCP chunk.
        return 1.0
    return 255 / highest if 0 < highest < _DARK else 1.0


def _image(folder: Path, name: str) -> bytes | None:
    """Its bytes; only of a plain file in the folder: a record must not be able to pull other files
    into a page."""
    if Path(name).name != name:
        return None
    file = folder / name
    try:
        image = b"" if file.is_symlink() else read_regular(file, _LARGEST)
    except (OSError, ValueError):
        # ValueError: a name with NUL, or one that the file system's encoding does not have.
        return None
    return image if image.startswith(_PNG) and len(image) > 24 else None


def _class(label: Any, classes: Sequence[str]) -> str:
    return classes[label] if isinstance(label, int) and 0 <= label < len(classes) else str(label)


def _read(file: Path, notes: list[str], limit: int = MAX_JSON) -> Any:
    try:
        return read_json(file, limit)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        notes.append(
            f"mistakes/{file.name}: could not be read ({type(error).__name__}); it was left out"
        )
        return None
