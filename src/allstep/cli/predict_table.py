"""Predictions as lines for a person: the image, then its classes, the likeliest first; or why it
cannot be read.

new/a.jpg      circle 98.2%   square 1.1%   triangle 0.7%
new/gone.jpg   cannot be read: No such file or directory
"""

from collections.abc import Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.console import Console

from allstep.console.escape import escaped

if TYPE_CHECKING:
    from allstep.train.use.predict import Prediction


def show(found: "Sequence[Prediction]", *, stderr: bool) -> None:
    """Prints the lines; long ones are left to the terminal to break."""
    console = Console(stderr=stderr, highlight=False)
    for line in lines(found):
        console.print(line, markup=False, soft_wrap=True)


def lines(found: "Sequence[Prediction]") -> list[str]:
    """One for each image. Reasons are long, so they widen no column."""
    rows = [[escaped(each.image), *_shares(each)] for each in found]
    widths = [max(map(cell_len, cells)) for cells in zip_longest(*rows, fillvalue="")]
    for row, each in zip(rows, found, strict=True):
        if each.problem is not None:
            row.append(f"cannot be read: {escaped(each.problem)}")
    return ["   ".join(_padded(row, widths)).rstrip() for row in rows]


def _shares(prediction: "Prediction") -> list[str]:
    return [f"{escaped(name)} {share:.1%}" for name, share in prediction.classes]


def _padded(cells: Sequence[str], widths: Sequence[int]) -> list[str]:
    room = [*widths, 0]
    return [cell + " " * (room[place] - cell_len(cell)) for place, cell in enumerate(cells)]
