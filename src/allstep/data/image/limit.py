"""How many pixels and bytes an image may have.

A file of a few kilobytes can stand for gigabytes of pixels: a PNG of one color, or a header that is
damaged. So the size is read from the header (`size`, `jpeg_header`) before anything is decoded, and
an image of more than `MAX_PIXELS` is refused, as a bad sample like any other. `data.max_pixels` in
a config, `--max-pixels` of `allstep data` and `allstep predict`, and `Transform(max_pixels=...)`
set another limit.

This module imports nothing, so the command line and configs can show the default.
"""

MAX_PIXELS = 100_000_000
"""The limit unless another is given: 10,000 x 10,000 pixels, which are 300 MB in memory."""


MAX_NBYTES = 1 << 30
"""Bytes of one image, as stored.

Decoders copy it, so a junk file of any size must not get there.
"""


def check_size(size: tuple[int, int], max_pixels: int) -> None:
    """Raise ValueError when `size` (height, width) is more than `max_pixels`, or none."""
    height, width = size
    if not height or not width:
        raise ValueError(f"broken image: {height} x {width} pixels")
    if height * width > max_pixels:
        found = f"{height} x {width} pixels, {height * width / 1e6:.4g} million"
        remedy = "data.max_pixels or --max-pixels raises the limit"
        raise ValueError(
            f"too large: {found}, expected at most {max_pixels / 1e6:.4g} million; {remedy}"
        )
