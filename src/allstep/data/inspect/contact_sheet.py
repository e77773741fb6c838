"""A contact sheet: samples of a source, each beside what a transform makes of it at several epochs.

```
stored        epoch 0      epoch 1      ...
17: dog
+--------+    +--------+   +--------+
|        |    |        |   |        |         one row for each sample
+--------+    +--------+   +--------+
```

The images are those that training with the same seed sees, before the batch part of a transform
(mixup, normalisation). A sample that cannot be delivered gets an empty place and the reason for its
title.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from allstep.data.augment.transform import Transform
from allstep.data.image.decode import decode
from allstep.data.sources.source import BadSample, Source
from allstep.errors import DataError

if TYPE_CHECKING:
    from PIL import Image

GAP = 6
BAND = 16  # room for one line of text
_SMALLEST = 96  # sides of small images are multiplied up to this, so that they can be seen
_PAPER, _INK = (255, 255, 255), (30, 30, 30)

Pixels = NDArray[np.uint8]


def sheet(
    source: Source, transform: Transform, numbers: Sequence[int], *, columns: int = 6, seed: int = 0
) -> "Image.Image":
    """The sheet of the samples `numbers`: the stored image and `columns` epochs of it."""
    rows = [_row(source, transform, number, columns, seed) for number in numbers]
    side = _cell([image for _, images in rows for image in images[1:]])
    return _draw(rows, side, columns)


def save(image: "Image.Image", path: Path) -> None:
    """Writes the sheet; the name's ending says in which format."""
    try:
        image.save(path)
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path}: cannot be written: {getattr(error, 'strerror', None) or error}"
        ) from error


def sheet_size(cell: tuple[int, int], rows: int, columns: int) -> tuple[int, int]:
    """Height and width of a sheet with cells of that height and width."""
    return BAND + rows * (BAND + cell[0] + GAP) + GAP, GAP + (1 + columns) * (cell[1] + GAP)


def _row(
    source: Source, transform: Transform, number: int, columns: int, seed: int
) -> tuple[str, list[Pixels]]:
    """Title and images of one sample."""
    try:
        sample = source.read(number)
        stored = decode(sample.data, max_pixels=transform.max_pixels)
        images = [
            _augmented(transform, sample.data, stored.shape, number, epoch, seed)
            for epoch in range(columns)
        ]
    except BadSample as error:
        return f"{number}: {error.reason}", []
    except ValueError as error:
        return f"{number}: {error}", []
    return f"{number}: {_class(source, sample.target)}", [stored, *images]


def _augmented(
    transform: Transform, data: Any, stored: tuple[int, ...], number: int, epoch: int, seed: int
) -> Pixels:
    out = np.zeros((*(transform.shape or stored)[:2], transform.channels), np.uint8)
    transform.one(data, out, transform.draw(seed, epoch, np.array([number])), 0)
    return out


def _class(source: Source, target: Any) -> str:
    if not isinstance(target, int | np.integer):
        return ""
    return source.classes[target] if 0 <= target < len(source.classes) else f"class {target}"


def _cell(images: Sequence[Pixels]) -> tuple[int, int]:
    """Height and width of a place for an image."""
    if not images:
        return _SMALLEST, _SMALLEST
    height, width = (max(image.shape[axis] for image in images) for axis in (0, 1))
    times = max(1, -(-_SMALLEST // max(height, width)))
    return height * times, width * times


def _draw(
    rows: Sequence[tuple[str, list[Pixels]]], cell: tuple[int, int], columns: int
) -> "Image.Image":
    from PIL import Image, ImageDraw

    height, width = sheet_size(cell, len(rows), columns)
    sheet = Image.new("RGB", (width, height), _PAPER)
    draw = ImageDraw.Draw(sheet)
    lefts = [GAP + column * (cell[1] + GAP) for column in range(columns + 1)]
    for left, text in zip(
        lefts, ["stored", *(f"epoch {epoch}" for epoch in range(columns))], strict=True
    ):
        draw.text((left, 2), text, fill=_INK)
    for number, (title, images) in enumerate(rows):
        top = BAND + number * (BAND + cell[0] + GAP)
        draw.text((GAP, top + 2), _plain(title), fill=_INK)
        for left, image in zip(lefts, images, strict=False):
            sheet.paste(_fitted(image, cell), (left, top + BAND))
    return sheet


def _plain(title: str) -> str:
    """The font that is always there has Latin letters only."""
    return title.encode("latin-1", "replace").decode("latin-1")


def _fitted(image: Pixels, cell: tuple[int, int]) -> "Image.Image":
    """The image as large as the cell allows; small ones with sharp pixels."""
    from PIL import Image

    shown = Image.fromarray(image[..., 0] if image.shape[2] == 1 else image).convert("RGB")
    scale = min(cell[0] / shown.height, cell[1] / shown.width)
    size = (max(1, round(shown.width * scale)), max(1, round(shown.height * scale)))
    return shown.resize(size, Image.Resampling.NEAREST if scale > 1 else Image.Resampling.LANCZOS)
