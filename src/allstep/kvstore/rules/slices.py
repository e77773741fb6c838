"""A value is cut into slices of 1 MB, each with its own lock and version (D16).

Two workers that push a large value then follow each other from slice to slice, and a slice is still
in a core's cache when the worker copies the new weights. Smaller slices cost more locks than they
save.
"""

SLICE_BYTES = 1 << 20

Span = tuple[int, int]
"""The first element of a slice, and the one after its last."""


def cut(numel: int, itemsize: int, nbytes: int = SLICE_BYTES) -> list[Span]:
    """Return the slices of a value of `numel` elements, of at most `nbytes` each.

    A value has at least one slice, even if it is empty: its lock protects the value's version.
    """
    step = max(1, nbytes // itemsize)
    return [(start, min(numel, start + step)) for start in range(0, max(1, numel), step)]
