"""Print predictions as lines: the image, then its classes, the most probable first.

For an image that cannot be read, the line has the reason.

    new/a.jpg      circle 98.2%   square 1.1%   triangle 0.7%
    new/gone.jpg   cannot be read: No such file or directory
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console

from allstep.console.escape import escaped
from allstep.console.text_table import columns

if TYPE_CHECKING:
    from allstep.train.use.predict import Prediction


def show(found: "Sequence[Prediction]", *, stderr: bool) -> None:
    """Print the lines without wrapping; the terminal breaks long ones."""
    console = Console(stderr=stderr, highlight=False)
    for line in lines(found):
        console.print(line, markup=False, soft_wrap=True)


def lines(found: "Sequence[Prediction]") -> list[str]:
    """Return one line per image, with aligned columns. Reasons do not widen columns."""
    return list(columns([[escaped(each.image), *_answer(each)] for each in found], gap=3))


def _answer(prediction: "Prediction") -> list[str]:
    """Return the classes with their probabilities as text, or why there are none."""
    if prediction.problem is not None:
        return [f"cannot be read: {escaped(prediction.problem)}"]
    return [f"{escaped(name)} {value:.1%}" for name, value in prediction.classes]
