"""Folders of small images for the tests of packing, checking and showing."""

import io
import os
import time
from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = ("cat", "dog", "eel")


def image(seed: int, height: int, width: int) -> Image.Image:
    """A smooth image that no other seed gives."""
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def encoded(seed: int, height: int = 24, width: int = 32, kind: str = "JPEG") -> bytes:
    file = io.BytesIO()
    image(seed, height, width).save(file, kind)
    return file.getvalue()


def make_folder(folder: Path, per_class: int = 8, height: int = 24, width: int = 32) -> Path:
    """Three classes of JPEG files; the last of each class is a PNG."""
    for label, name in enumerate(CLASSES):
        (folder / name).mkdir(parents=True)
        for number in range(per_class):
            kind, suffix = ("PNG", "png") if number == per_class - 1 else ("JPEG", "jpg")
            path = folder / name / f"{number:03d}.{suffix}"
            path.write_bytes(encoded(1000 * label + number, height + number, width, kind))
    return aged(folder)


def aged(folder: Path) -> Path:
    """Return the folder, in which nothing seems to have changed for an hour.

    A class folder that has just changed is listed only when a later change would show: see
    `allstep.data.sources.folder`.
    """
    then = time.time() - 3600
    for path in (folder, *folder.rglob("*")):
        if path.is_dir() and not path.is_symlink():
            os.utime(path, (then, then))
    return folder
