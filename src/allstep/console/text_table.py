"""Rows of words as columns of plain text: as wide as they need be, in a terminal, a file and a log
alike."""

from collections.abc import Iterator, Sequence

_GAP = "  "


def columns(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """One line for each row; all rows have as many words. No line ends in blanks."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield _GAP.join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip()
