"""Tables as aligned columns of plain text, the same on a terminal, in a file and in a log."""

from collections.abc import Iterator, Sequence

_GAP = "  "


def columns(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield a line per row, with aligned columns and no trailing spaces; rows have equal length."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield _GAP.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
