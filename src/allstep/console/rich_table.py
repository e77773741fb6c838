"""Tables that rich draws to fit the terminal, in one style: columns without lines around them.

Cells are texts, not markup, and control characters in them are escaped: a name of a file or of a
class may contain anything.
"""

from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console, RenderableType
from rich.table import Column, Table
from rich.text import Text

from allstep.console.escape import escaped


def cell(text: str, style: str = "", keep: str = "") -> Text:
    """Return the content of a cell. `keep`: control characters that are not escaped."""
    return Text(escaped(text, keep=keep), style=style)


def name_value_table(rows: Iterable[tuple[str, str]], keep: str = "") -> Table:
    """Return a table of names and values; long values are wrapped, not cut.

    `keep`: control characters of the values that are not escaped, such as intended line breaks.
    """
    table = Table(
        Column(style="cyan", no_wrap=True),
        Column(overflow="fold"),
        show_header=False,
        box=None,
        padding=(0, 3, 0, 0),
        pad_edge=False,
    )
    for name, value in rows:
        table.add_row(cell(name), cell(value, keep=keep))
    return table


def text_columns(*heads: str) -> Table:
    """Return an empty table of texts with these heads."""
    return Table(*heads, box=None, padding=(0, 2, 0, 0), pad_edge=False)


def figure_columns(names: Sequence[str], figures: Iterable[str]) -> Table:
    """Return an empty table: columns for names, which do not wrap, and for figures.

    `names` and `figures` are the heads of the columns. Figures are aligned right.
    """
    table = Table(
        *(Column(name, no_wrap=True) for name in names),
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
    )
    for head in figures:
        table.add_column(head, justify="right")
    return table


def print_table(drawn: RenderableType, *, stderr: bool = False) -> None:
    """Print a table to standard output, or to standard error."""
    Console(stderr=stderr, highlight=False).print(drawn)
