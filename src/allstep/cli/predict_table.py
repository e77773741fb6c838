"""Print predictions as lines: the image, then its classes, the most probable first.

For an image that cannot be read, the line has the reason.

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
    """Print the lines without wrapping; the terminal breaks long ones."""
    console = Console(stderr=stderr, highlight=False)
    for line in lines(found):
        console.print(line, markup=False, soft_wrap=True)


def lines(found: "Sequence[Prediction]") -> list[str]:
    """Return one line per image, with aligned columns. Reasons do not widen columns."""
    rows = [[escaped(each.image), *_probabilities(each)] for each in found]
    widths = [max(map(cell_len, cells)) for cells in zip_longest(*rows, fillvalue="")]
    for row, each in zip(rows, found, strict=True):
        if each.problem is not None:
            row.append(f"cannot be read: {escaped(each.problem)}")
    return ["   ".join(_padded(row, widths)).rstrip() for row in rows]


def _probabilities(prediction: "Prediction") -> list[str]:
    """Return the classes with their probabilities as text."""
    return [f"{escaped(name)} {value:.1%}" for name, value in prediction.classes]


def _padded(cells: Sequence[str], widths: Sequence[int]) -> list[str]:
    """Return the cells filled up to the widths of their columns; a further cell stays as it is."""
    room = [*widths, 0]
    return [cell + " " * (room[column] - cell_len(cell)) for column, cell in enumerate(cells)]
