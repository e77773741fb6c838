"""What the last evaluation left in `mistakes/`, so that a report needs no data.

```
mistakes/
  mistakes.json     [{"file": "0001.png", "label": "shirt", "predicted": "coat", "probability": 0.98, "number": 4711}, ...]
  0001.png          the picture, the worst mistake first
  confusion.json    {"classes": ["shirt", "coat"], "counts": [[95, 5], [7, 93]]}    counts[label][predicted]
```

Labels are names, or numbers of classes in confusion.json. A picture is taken over byte by byte; one that is not a PNG in that folder,
or that would make the page large, is left out.
"""

import base64
import io
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allstep.bounded import read_json

_SHOWN = 24
_LARGEST = 40_000  # bytes of one picture, so that all of them stay below a megabyte
_PNG = b"\x89PNG\r\n\x1a\n"
_SMALL = 64  # pixels; smaller pictures are shown with hard edges
_DARK = 64  # levels; a picture without higher ones looks black


@dataclass(frozen=True)
class Mistake:
    """One picture that the net took for something else."""

    source: str
    """The picture, as a data: address."""
    width: int
    height: int
    label: str
    predicted: str
    probability: float | None
    """What the net gave to `predicted`."""
    number: int | None
    """Of the sample."""
    brightness: float = 1.0
    """How many times brighter it must be shown to be seen: the levels of the 8x8 digits go from 0 to 16, not to 255."""

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
        """The most frequent confusions: label, predicted, how often, and the share of the label's samples."""
        pairs = [
            (self.classes[i], self.classes[j], row[j], row[j] / sum(row))
            for i, row in enumerate(self.counts)
            for j in range(len(row))
            if i != j and row[j]
        ]
        return sorted(pairs, key=lambda pair: -pair[2])[:number]


def read_confusion(folder: Path, notes: list[str]) -> Confusion | None:
    """The matrix in `folder`, if there is one that fits its classes."""
    content = _read(folder / "confusion.json", notes)
    if content is None:
        return None
    try:
        classes = tuple(map(str, content["classes"]))
        counts = tuple(tuple(map(int, row)) for row in content["counts"])
    except (TypeError, KeyError, ValueError):
        classes, counts = (), ()
    if not classes or [len(row) for row in counts] != [len(classes)] * len(classes) or min(map(min, counts)) < 0:
        notes.append("mistakes/confusion.json: expected `classes` and a square of `counts`; it was left out")
        return None
    return Confusion(classes, counts)


def read_mistakes(folder: Path, notes: list[str]) -> tuple[Mistake, ...]:
    """The worst mistakes in `folder` that can be shown."""
    entries = _read(folder / "mistakes.json", notes)
    if not isinstance(entries, list):
        return ()
    classes = confusion.classes if (confusion := read_confusion(folder, [])) else ()
    found = [_mistake(folder, entry, classes) for entry in entries[:_SHOWN]]
    if missing := found.count(None):
        notes.append(f"mistakes/: {missing} of {len(found)} pictures are missing, no PNG, or over {_LARGEST:,} bytes")
    return tuple(mistake for mistake in found if mistake is not None)


def _mistake(folder: Path, entry: Any, classes: Sequence[str]) -> Mistake | None:
    if not isinstance(entry, Mapping):
        return None
    picture = _picture(folder, str(entry.get("file")))
    if picture is None:
        return None
    probability, number = entry.get("probability"), entry.get("number")
    return Mistake(
        source="data:image/png;base64," + base64.b64encode(picture).decode(),
        width=int.from_bytes(picture[16:20], "big"),
        height=int.from_bytes(picture[20:24], "big"),
        label=_class(entry.get("label"), classes),
        predicted=_class(entry.get("predicted"), classes),
        probability=float(probability) if isinstance(probability, int | float) else None,
        number=number if isinstance(number, int) else None,
        brightness=_brightness(picture),
    )


def _brightness(picture: bytes) -> float:
    """255 over the highest level of a picture that is dark all over; 1 for others, and for what cannot be decoded."""
    import numpy as np  # only runs with mistakes wait for these
    from PIL import Image

    try:
        with warnings.catch_warnings(action="error"), Image.open(io.BytesIO(picture)) as image:
            highest = int(np.asarray(image.convert("L")).max())
    except (OSError, ValueError, SyntaxError, Warning, Image.DecompressionBombError):
        return 1.0
    return 255 / highest if 0 < highest < _DARK else 1.0


def _picture(folder: Path, name: str) -> bytes | None:
    """Its bytes; only of a plain file in the folder: a record must not be able to pull other files into a page."""
    file = folder / name
    if Path(name).name != name or "\0" in name or file.is_symlink() or not file.is_file():
        return None
    picture = file.read_bytes() if file.stat().st_size <= _LARGEST else b""
    return picture if picture.startswith(_PNG) and len(picture) > 24 else None


def _class(label: Any, classes: Sequence[str]) -> str:
    return classes[label] if isinstance(label, int) and 0 <= label < len(classes) else str(label)


def _read(file: Path, notes: list[str]) -> Any:
    try:
        return read_json(file)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        notes.append(f"mistakes/{file.name}: could not be read ({type(error).__name__}); it was left out")
        return None
