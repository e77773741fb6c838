"""Tables as aligned columns of plain text, the same on a terminal, in a file and in a log."""

from collections.abc import Iterator, Sequence
from itertools import zip_longest

from rich.cells import cell_len


def columns(rows: Sequence[Sequence[str]], gap: int = 2) -> Iterator[str]:
    """Yield a line per row, with aligned columns and no trailing spaces.

    Widths are those of a terminal, where some characters take two places. Rows may have different
    lengths: the last cell of a row is followed by nothing, so it does not widen its column.
    `gap` is the number of spaces between columns.
    """
    cells = zip_longest(*(row[:-1] for row in rows), fillvalue="")
    widths = [max(map(cell_len, column)) + gap for column in cells]
    for row in rows:
        padded = map(_padded, row, [*widths, 0])
        yield "".join(padded).rstrip()


def _padded(cell: str, width: int) -> str:
    """Return the cell filled with spaces up to a width of the terminal."""
    return cell + " " * (width - cell_len(cell))
