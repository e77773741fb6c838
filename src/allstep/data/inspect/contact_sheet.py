"""A contact sheet: samples of a source, each next to its augmented versions of several epochs.

```
stored        epoch 0      epoch 1      ...
17: dog
+--------+    +--------+   +--------+
|        |    |        |   |        |         one row for each sample
+--------+    +--------+   +--------+
```

The images are those of a training run with the same seed, before the operations that a transform
applies to whole batches (mixup, normalization). A bad sample has an empty row, with the reason as
its title.
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

# Pixels between cells, and the height of a line of text.
GAP, BAND = 6, 16
# Pixels. Smaller images are enlarged by a whole factor to at least this side, to be visible.
_SMALLEST = 96
_PAPER, _INK = (255, 255, 255), (30, 30, 30)

Pixels = NDArray[np.uint8]


def sheet(
    source: Source, transform: Transform, numbers: Sequence[int], *, columns: int = 6, seed: int = 0
) -> "Image.Image":
    """Return the contact sheet of the samples `numbers`, one row per sample.

    A row has the stored image, then the images of epochs 0 to `columns` - 1 of a run with `seed`.
    """
    rows = [_row(source, transform, number, columns, seed) for number in numbers]
    side = _cell([image for _, images in rows for image in images[1:]])
    return _draw(rows, side, columns)


def save(image: "Image.Image", path: Path) -> None:
    """Write a sheet to `path`, in the format that its suffix names."""
    try:
        image.save(path)
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path}: cannot be written: {getattr(error, 'strerror', None) or error}"
        ) from error


def sheet_size(cell: tuple[int, int], rows: int, columns: int) -> tuple[int, int]:
    """Return height and width of a sheet, in pixels; `cell` is height and width of a cell."""
    return BAND + rows * (BAND + cell[0] + GAP) + GAP, GAP + (1 + columns) * (cell[1] + GAP)


def _row(
    source: Source, transform: Transform, number: int, columns: int, seed: int
) -> tuple[str, list[Pixels]]:
    """Return title and images of one sample; no images, and the reason as title, for a bad one."""
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
    """Return height and width of a cell: those of the largest image, enlarged if it is small."""
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
    captions = ["stored", *(f"epoch {epoch}" for epoch in range(columns))]
    for left, text in zip(lefts, captions, strict=True):
        draw.text((left, 2), text, fill=_INK)
    for number, (title, images) in enumerate(rows):
        top = BAND + number * (BAND + cell[0] + GAP)
        draw.text((GAP, top + 2), _plain(title), fill=_INK)
        for left, image in zip(lefts, images, strict=False):
            sheet.paste(_fitted(image, cell), (left, top + BAND))
    return sheet


def _plain(title: str) -> str:
    """Return `title` with "?" for characters that Pillow's built-in font lacks (not Latin-1)."""
    return title.encode("latin-1", "replace").decode("latin-1")


def _fitted(image: Pixels, cell: tuple[int, int]) -> "Image.Image":
    """Return the image scaled to fit the cell; enlarged pixels keep sharp edges."""
    from PIL import Image

    shown = Image.fromarray(image[..., 0] if image.shape[2] == 1 else image).convert("RGB")
    scale = min(cell[0] / shown.height, cell[1] / shown.width)
    size = (max(1, round(shown.width * scale)), max(1, round(shown.height * scale)))
    return shown.resize(size, Image.Resampling.NEAREST if scale > 1 else Image.Resampling.LANCZOS)
