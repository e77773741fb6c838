"""A value is cut into slices of 1 MB, each with its own lock and version (D16).

Two workers that push a large value then follow each other from slice to slice, and a slice is still
in a core's cache when the worker copies the new weights. Smaller slices cost more locks than they
save.

A slice of a matrix consists of whole rows, so that a push of some rows (an embedding's gradient)
updates each of them under one lock; a row of more than 1 MB is cut into equal parts. A matrix of
more than 128 MB has about 128 slices and not more: such a push visits all of them, and would
otherwise spend more time on locks than on its rows.
"""

SLICE_BYTES = 1 << 20
_MOST_SLICES = 128

Span = tuple[int, int]
"""The first element of a slice, and the one after its last."""


def cut(numel: int, itemsize: int, nbytes: int = SLICE_BYTES, width: int = 1) -> list[Span]:
    """Return the slices of a value of `numel` elements, of about `nbytes` each.

    width: elements of a row. A value has at least one slice, even if it is empty: its lock protects
    the value's version.
    """
    if width > 1:
        nbytes = max(nbytes, numel * itemsize // _MOST_SLICES)
    most, width = max(1, nbytes // itemsize), max(1, width)
    if width <= most:
        return _steps(0, numel, most // width * width)
    step = -(-width // -(-width // most))
    rows = range(0, max(1, numel), width)
    return [span for row in rows for span in _steps(row, min(numel, row + width), step)]


def _steps(start: int, end: int, step: int) -> list[Span]:
    return [(at, min(end, at + step)) for at in range(start, max(start + 1, end), step)]
