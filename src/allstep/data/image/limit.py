"""Limits for the pixels and bytes of an image.

A file of a few kilobytes can decode to gigabytes of pixels: a PNG of one color, or a damaged
header. So the size is read from the header (`size`, `jpeg_header`) before anything is decoded, and
an image of more than `MAX_PIXELS` is refused and counts as a bad sample. `data.max_pixels` in a
config, `--max-pixels` of `allstep data` and `allstep predict`, and `Transform(max_pixels=...)` set
another limit.

This module imports nothing, so the command line and configs can show the default.
"""

MAX_PIXELS = 100_000_000
"""Default limit: 10,000 x 10,000 pixels, which take 300 MB of memory in RGB."""


MAX_NBYTES = 1 << 30
"""Maximum bytes of one stored image. Decoders copy the file, so its size must be limited."""


def check_size(size: tuple[int, int], max_pixels: int) -> None:
    """Raise ValueError if `size` (height, width) has no pixels, or more than `max_pixels`."""
    height, width = size
    if not height or not width:
        raise ValueError(f"broken image: {height} x {width} pixels")
    if height * width > max_pixels:
        found = f"{height} x {width} pixels, {height * width / 1e6:.4g} million"
        remedy = "data.max_pixels or --max-pixels raises the limit"
        raise ValueError(
            f"too large: {found}, expected at most {max_pixels / 1e6:.4g} million; {remedy}"
        )
