"""Images for tests that look a little like photographs: soft shapes with some grain.

Random noise would flatter no decoder.
"""

import io
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image

Pixels = NDArray[np.uint8]


def scene(height: int, width: int, seed: int = 0, channels: int = 3, grain: float = 6.0) -> Pixels:
    """Always the same image for the same arguments."""
    rng = np.random.default_rng([seed, height, width])
    coarse = rng.uniform(-60, 315, (max(2, height // 24), max(2, width // 24), channels)).astype(
        np.float32
    )
    smooth = cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC).reshape(
        height, width, channels
    )
    return np.clip(smooth + rng.normal(0, grain, smooth.shape), 0, 255).astype(np.uint8)


def encoded(pixels: Pixels, kind: str = "JPEG", mode: str | None = None, **options: Any) -> bytes:
    """The bytes of a file of this kind, as Pillow writes it."""
    image = Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels)
    buffer = io.BytesIO()
    (image.convert(mode) if mode else image).save(buffer, kind, **options)
    return buffer.getvalue()


def by_pillow(data: bytes, mode: str = "RGB") -> Pixels:
    """What Pillow makes of these bytes."""
    with Image.open(io.BytesIO(data)) as image:
        pixels = np.array(image.convert(mode))
    return pixels if pixels.ndim == 3 else pixels[..., None]


def distance(a: Pixels, b: Pixels) -> float:
    """Mean absolute difference, in levels."""
    assert a.shape == b.shape
    return float(np.abs(a.astype(np.int64) - b).mean())
