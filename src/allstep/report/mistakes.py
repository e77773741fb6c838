"""Reading the folder `mistakes/` of a run, so that a report does not need the dataset.

```
mistakes/
  mistakes.json     [{"file": "0001.png", "label": "shirt", "predicted": "coat",
                      "probability": 0.98, "number": 4711}, ...]     the worst mistake first
  0001.png          the image of the worst mistake
  confusion.json    {"classes": ["shirt", "coat"],
                     "counts": [[95, 5], [7, 93]]}                   counts[label][predicted]
```

The last evaluation writes these files. Labels are names, or numbers of classes in confusion.json.
Images are copied unchanged into the page; files that are not a PNG in that folder, or that would
make the page large, are omitted.
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
# bytes of one image, so that all of them together stay below a megabyte
_LARGEST = 40_000
_PNG = b"\x89PNG\r\n\x1a\n"
_MAX_CLASSES = 2000
_LARGEST_MATRIX = 32 << 20
"""Maximum bytes of confusion.json: 8 for each count of 2,000 classes; 2 or 3 are usual."""
_LARGEST_COUNT = 1 << 64
_MAX_PIXELS = 1 << 22
"""Maximum pixels of a decoded image: a file of 40,000 bytes may have 80 million."""
# pixels; smaller images are shown with hard edges
_SMALL = 64
# levels; an image without higher ones looks black
_DARK = 64


@dataclass(frozen=True)
class Mistake:
    """An image for which the model predicted a wrong class."""

    source: str
    """The image as a data: URL."""
    width: int
    height: int
    label: str
    predicted: str
    probability: float | None
    """Probability that the model assigned to `predicted`; None if unknown."""
    number: int | None
    """Number of the sample; None if unknown."""
    brightness: float = 1.0
    """Factor by which to brighten the image: the 8x8 digits have levels to 16 instead of 255."""

    @property
    def is_small(self) -> bool:
        """Whether the image is shown with hard edges."""
        return max(self.width, self.height) < _SMALL


@dataclass(frozen=True)
class Confusion:
    """The confusion matrix: counts[label][predicted]."""

    classes: tuple[str, ...]
    counts: tuple[tuple[int, ...], ...]

    @property
    def total(self) -> int:
        """Number of samples."""
        return sum(map(sum, self.counts))

    def worst(self, number: int) -> list[tuple[str, str, int, float]]:
        """Return the `number` most frequent confusions.

        Each is (label, predicted, count, fraction of the label's samples).
        """
        most = heapq.nlargest(number, self._wrong(), key=lambda found: found[0])
        names, counts = self.classes, self.counts
        return [(names[i], names[j], count, count / sum(counts[i])) for count, i, j in most]

    def _wrong(self) -> Iterator[tuple[int, int, int]]:
        """Yield (count, label, predicted) of every confusion; there may be millions."""
        for i, row in enumerate(self.counts):
            for j, count in enumerate(row):
                if count and i != j:
                    yield count, i, j


def read_confusion(folder: Path, notes: list[str]) -> Confusion | None:
    """Return the confusion matrix in `folder`; None, with a note, if it is damaged or too large."""
    content = _read(folder / "confusion.json", notes, _LARGEST_MATRIX)
    if content is None:
        return None
    try:
        # Check the size before building a table.
        num_classes = max(len(content["classes"]), len(content["counts"]))
        if num_classes > _MAX_CLASSES:
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
    """Return whether the counts are a square matrix of plausible numbers of samples."""
    # int() accepts text of 4,300 digits, and Python refuses to print the sum of two such numbers.
    return [len(row) for row in counts] == [num_classes] * num_classes and all(
        min(row) >= 0 and max(row) < _LARGEST_COUNT for row in counts
    )


def _beyond(num_classes: int) -> str:
    found = f"has {num_classes:,} classes, the maximum is {_MAX_CLASSES:,}"
    return f"mistakes/confusion.json: {found}; it was left out"


def read_mistakes(
    folder: Path,
    notes: list[str],
    classes: Sequence[str] = (),
) -> tuple[Mistake, ...]:
    """Return the worst mistakes in `folder` that can be shown.

    `notes` receives a note about images that are omitted. `classes` are the names for labels that
    are numbers.
    """
    entries = _read(folder / "mistakes.json", notes)
    if not isinstance(entries, list):
        return ()
    found = [_mistake(folder, entry, classes) for entry in entries[:_SHOWN]]
    if missing := found.count(None):
        notes.append(
            f"mistakes/: {missing} of {len(found)} images are missing, not PNG, or over"
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
    """Return 255 divided by the highest level of a dark image; 1 for others and damaged ones."""
    # imported here because the imports are slow and only needed for runs with mistakes
    import numpy as np
    from PIL import Image

    try:
        with warnings.catch_warnings(action="error"), Image.open(io.BytesIO(code)) as image:
            if image.width * image.height > _MAX_PIXELS:
                return 1.0
            highest = int(np.asarray(image.convert("L")).max())
    except Exception:
        # Pillow raises errors of any type for damaged files: IndexError for an empty iCCP chunk.
        return 1.0
    return 255 / highest if 0 < highest < _DARK else 1.0


def _image(folder: Path, name: str) -> bytes | None:
    """Return the bytes of a PNG in `folder`; None if it is not a plain file there.

    A record must not be able to add other files of the machine to the page.
    """
    if Path(name).name != name:
        return None
    file = folder / name
    try:
        image = b"" if file.is_symlink() else read_regular(file, _LARGEST)
    except (OSError, ValueError):
        # ValueError: a name with NUL, or one that the file system cannot encode.
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
